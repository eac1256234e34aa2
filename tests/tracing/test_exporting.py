"""Switching on: what is missing is said, what OpenTelemetry's variables say is done, and nobody waits."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import cluster_manager.main as manager
import hostagent.main as host_agent
from ebbtide.extras import installing
from ebbtide.lab.state import write_private
from ebbtide.rest.errors import AccessError
from ebbtide.tracing import spans
from ebbtide.tracing.context import new_trace
from ebbtide.tracing.exporting import check_tracing, exporting
from ebbtide.tracing.spans import operation, span, within
from tests.tracing.collector import collecting
from tests.waiting import until

MISSING = f"--tracing needs the extra otel, which is not installed: {installing('otel')}"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    # A collector that answers has time for it on a busy machine, too.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    monkeypatch.setattr("ebbtide.tracing.exporting.FLUSH_S", 30.0)


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ModuleNotFoundError(name)
        return find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)


@pytest.mark.usefixtures("not_installed")
def test_both_daemons_name_the_extra_that_is_missing_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("token", "hosts.key"):
        write_private(tmp_path / name, f"secret-of-{name}")
    monkeypatch.chdir(tmp_path)
    options = ["--token-file", "token", "--hosts-key-file", "hosts.key", "--database", "m.sqlite", "--tracing"]
    assert manager.main(options) == 2
    assert capsys.readouterr().err == f"ebb-manager: {MISSING}\n"
    monkeypatch.setattr(sys, "argv", ["x", "--id", "a", "--capacity", "auto", "--token-file", "token", "--tracing"])
    with pytest.raises(SystemExit) as ended:
        host_agent.main()
    assert (ended.value.code, capsys.readouterr().err) == (2, f"ebb-hostagent: {MISSING}\n")
    assert not (tmp_path / "m.sqlite").exists()


@pytest.mark.usefixtures("not_installed")
def test_off_nothing_is_missed() -> None:
    check_tracing(False)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_TRACES_EXPORTER", "jaeger", "must be otlp or none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "must be http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "must be http/protobuf"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4317", "must be http:// or https:// with a host"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:grpc", "must be http:// or https:// with a host"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "file:///tmp", "must be http:// or https:// with a host"),
    ],
)
def test_a_variable_that_asks_for_what_cannot_be_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(AccessError, match=f"{name} {said}, but is '{value}'"):
        check_tracing(True, {name: value})


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
async def test_opentelemetrys_own_switch_wins(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    async with exporting(True, "ebb-manager"):
        assert not spans.is_on()


async def test_a_batch_size_that_cannot_be_is_an_error_and_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-5")
    with pytest.raises(AccessError, match="a variable of OpenTelemetry's is wrong"):
        async with exporting(True, "ebb-manager"):
            pass
    assert not spans.is_on()


async def test_service_resource_headers_and_sampler_are_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "manager-of-site-1")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
        async with exporting(True, "ebb-manager", host="host-a"):
            with operation("operation target", vm="web", cores=1.5, resumed=False), span("step"):
                pass
        inner, outer = sorted(collector.spans, key=lambda one: one.name, reverse=True)
        assert (outer.name, inner.name, inner.parent) == ("operation target", "step", outer.span_id)
        assert outer.attributes == {"ebbtide.vm": "web", "ebbtide.cores": 1.5, "ebbtide.resumed": False}
        assert outer.service == "manager-of-site-1"
        assert outer.resource["deployment.environment"] == "lab"
        assert outer.resource["ebbtide.host"] == "host-a"
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        async with exporting(True, "ebb-manager"):
            with operation("operation target") as one:
                assert one.trace_id is None
        assert len(collector.spans) == 2


async def test_a_sampler_that_breaks_leaves_spans_out_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("no sampling today")

    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setattr("opentelemetry.sdk.trace.sampling.ParentBased.should_sample", breaks)
        async with exporting(True, "ebb-manager"):
            with operation("operation target") as one:
                assert one.trace_id is None
            with within(new_trace()), operation("operation target"), span("step"):
                pass
        assert not collector.spans


async def test_what_waits_is_bounded_and_the_newest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
        collector.answers.clear()
        async with exporting(True, "ebb-manager"):
            with operation("first"):
                pass
            await until(lambda: collector.requests == 1)
            for number in range(100):
                with operation("operation target", number=number):
                    pass
            collector.answers.set()
        numbers = [one.attributes["ebbtide.number"] for one in collector.spans if one.name != "first"]
        assert sorted(numbers) == list(range(92, 100))


async def test_a_collector_that_never_answers_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.tracing.exporting.FLUSH_S", 0.05)
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
        collector.answers.clear()
        async with asyncio.timeout(20), exporting(True, "ebb-manager"):
            with operation("operation target"):
                pass
            await until(lambda: collector.requests == 1)
        assert not collector.spans


def test_a_plain_installation_has_no_opentelemetry_in_its_lock() -> None:
    locked = (Path(__file__).parents[2] / "requirements.lock").read_text()
    assert "opentelemetry" not in locked
    help_text = subprocess.run(
        [sys.executable, "-m", "cluster_manager.main", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "--tracing" in help_text


async def test_a_variable_that_the_library_does_without_is_not_said_to_keep_spans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "abc")
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with capture_logs() as logged:
            async with exporting(True, "ebb-manager"):
                with operation("operation target"):
                    pass
                said = list(logged)
                logging.getLogger("opentelemetry").warning("nobody answers")
        assert len(collector.spans) == 1
    assert {one["event"] for one in said} == {"OpenTelemetry says", "spans are sent"}
    assert any("abc" in one["why"] for one in said if "why" in one)
    assert ("spans are not sent", "nobody answers") in [(one["event"], one["why"]) for one in logged[len(said) :]]

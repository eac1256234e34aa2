"""The nginx adapter against a real nginx, through the REST hook."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app_adapters.adapter import Deadline, Promise, Refusal
from app_adapters.errors import ApplicationError
from app_adapters.processes.process_memory import read_pid
from app_adapters.server import HookServer
from app_adapters.web.nginx import NginxAdapter
from guestagent import applications
from tests.adapters.cache import free_port
from tests.adapters.rest import Rest
from tests.adapters.web_load import WebLoad
from tests.adapters.web_pool import Record, answered, cores, ten_cycles, to_one_worker_and_back
from tests.adapters.web_servers import Nginx
from tests.guestagent.harness import bench
from tests.waiting import until_sync

pytestmark = pytest.mark.service


def adapter_of(nginx: Nginx, workers_file: Path, workers: int = 4, minimum_workers: int = 1) -> NginxAdapter:
    master = str(nginx.pid_file)
    return NginxAdapter(nginx.command, str(workers_file), lambda: read_pid(master), workers, 4.0, minimum_workers)


@contextlib.contextmanager
def hooked(tmp_path: Path, **more: Any) -> Iterator[tuple[Nginx, Rest, Path]]:
    """An nginx of 4 workers and 4 cores, the hook of its adapter, and the file of its workers."""
    tmp_path.chmod(0o755)
    token, workers_file = tmp_path / "token", tmp_path / "workers.conf"
    token.write_text("t")
    workers_file.write_text("worker_processes 4;\n")
    nginx = Nginx(tmp_path / "nginx", f"include {workers_file};", **more)
    try:
        nginx.ready(4)
        server = HookServer(adapter_of(nginx, workers_file), port=0, token_file=str(token)).start()
        try:
            yield nginx, Rest(server.address, "t"), workers_file
        finally:
            server.stop()
    finally:
        nginx.stop()


def test_workers_go_and_come_back_while_every_request_is_answered(tmp_path: Path, record_property: Record) -> None:
    with hooked(tmp_path) as (nginx, rest, workers_file), WebLoad(nginx.port) as load:

        def one_is_configured() -> None:
            assert workers_file.read_text() == "worker_processes 1;\n"

        # Its tables of connections come free.
        to_one_worker_and_back(nginx, rest, load, 10, 3, one_is_configured, lambda: None)
        assert workers_file.read_text() == "worker_processes 4;\n"
    answered(load, "nginx", record_property)


def test_ten_cycles_leave_workers_and_memory_as_they_were(tmp_path: Path) -> None:
    with hooked(tmp_path) as (nginx, rest, _), WebLoad(nginx.port) as load:
        ten_cycles(nginx, rest, load, 3, lambda: None)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["nginx", "token", "workers.conf"]
    assert load.errors == []


def test_an_old_worker_with_a_request_is_reported_and_leaves_by_its_timeout(tmp_path: Path) -> None:
    slow = f"limit_rate 100; return 200 {'x' * 3000};"
    with hooked(tmp_path, shutdown_s=5, location=slow) as (nginx, rest, _):
        with socket.create_connection(("127.0.0.1", nginx.port), 60) as answered_slowly:
            answered_slowly.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answered_slowly.recv(1)
            done = cores(rest, "down", "deflate", 1.0, deadline_s=3)
            assert "1 old workers still finish their requests" in done["reason"]
            assert done["released"]["cpu_cores"] == 2
            assert len(nginx.workers()) == 2
            staying = nginx.workers()
            # Asked again, it waits for the old one instead of making another by a reload.
            done = cores(rest, "again", "deflate", 1.0)
            assert done["released"]["cpu_cores"] == 1
            assert set(nginx.workers()) < set(staying)
        assert rest.capabilities()["resources"]["cpu_cores"]["current"] == 1


@pytest.mark.parametrize(
    ("include", "advice"),
    [
        ("worker_processes 2;", "instead of 'worker_processes 2;' ({config}, line 1)"),
        ("", "into {config}, at its top"),
    ],
)
def test_a_configuration_without_the_file_is_refused_with_the_line_to_add(
    tmp_path: Path, include: str, advice: str
) -> None:
    tmp_path.chmod(0o755)
    workers_file = tmp_path / "workers.conf"
    nginx = Nginx(tmp_path / "nginx", include)
    try:
        nginx.ready(2 if include else 1)
        adapter = adapter_of(nginx, workers_file, workers=8)
        missing = adapter.reinflate({"cpu_cores": 4.0}, Deadline(60))
        assert isinstance(missing, Refusal)
        assert f"{workers_file} is missing" in missing.reason
        workers_file.write_text("worker_processes 8;\n")
        answer = adapter.reinflate({"cpu_cores": 4.0}, Deadline(60))
        assert isinstance(answer, Refusal)
        assert f"put the line 'include {workers_file};' " in answer.reason
        assert advice.format(config=nginx.config) in answer.reason
        assert workers_file.read_text() == "worker_processes 8;\n"
    finally:
        nginx.stop()


def test_a_configuration_that_fails_its_test_is_told_and_nothing_changes(tmp_path: Path) -> None:
    with hooked(tmp_path) as (nginx, rest, workers_file), WebLoad(nginx.port) as load:
        old = nginx.workers()
        good = nginx.config.read_text()
        nginx.config.write_text(good + "\nnonsense;\n")
        status, answer = rest.target("down", "deflate", 0, target={"cpu_cores": 1.0})
        assert (status, answer["state"]) == (409, "refused")
        assert 'unknown directive "nonsense"' in answer["reason"]
        # The same when it goes wrong between the decision and the work.
        nginx.config.write_text(good)
        promise = adapter_of(nginx, workers_file).deflate({"cpu_cores": 1.0}, "ask", Deadline(60))
        assert isinstance(promise, Promise)
        nginx.config.write_text(good + "\nnonsense;\n")
        with pytest.raises(ApplicationError, match=r"nginx was left as it was: .*nonsense"):
            promise.work()
        load.more()
        assert nginx.workers() == old
        assert workers_file.read_text() == "worker_processes 4;\n"
    assert load.errors == []


def test_a_number_that_was_written_without_its_reload_is_put_right_at_full_size(tmp_path: Path) -> None:
    with hooked(tmp_path) as (nginx, rest, workers_file), WebLoad(nginx.port) as load:
        workers_file.write_text("worker_processes 1;\n")  # as an adapter leaves it that is killed before the reload
        done = cores(rest, "up", "reinflate", 4.0)
        assert done["state"] == "released", done
        assert workers_file.read_text() == "worker_processes 4;\n"
        # And where all is right nothing is reloaded.
        before = nginx.workers()
        cores(rest, "again", "reinflate", 4.0)
        assert nginx.workers() == before
        os.kill(nginx.pid, signal.SIGHUP)
        until_sync(lambda: not set(before) & set(nginx.workers()), "the reload")
        nginx.wait_for_workers(4)
        load.more()
    assert load.errors == []


def test_a_reinflation_that_finds_the_configuration_broken_is_told_again_once_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applications, "AGAIN_S", (0.1, 0.2))
    with hooked(tmp_path) as (nginx, _, workers_file), bench(tmp_path) as guest:
        host = guest.host()
        host.hello()
        token = str(guest.run_dir / "token")
        server = HookServer(adapter_of(nginx, workers_file), port=0, token_file=token).start()
        try:
            drop_in = guest.adapters_dir / "nginx.json"
            drop_in.write_text(json.dumps({"name": "nginx", "url": server.url}))
            drop_in.chmod(0o644)
            params = {"deadline_s": 20, "bound_mib": 1024, "full_cores": 4.0}
            host.result("application.deflate", request_id="r", mode="ask", target={"cpu_cores": 1.0}, **params)
            nginx.ready(1)
            good = nginx.config.read_text()
            nginx.config.write_text(good + "\nnonsense;\n")
            answer = host.result("application.reinflate", request_id="back", target={"cpu_cores": 4.0}, **params)
            assert (answer["state"], "nonsense" in answer["reason"]) == ("refused", True), answer
            nginx.config.write_text(good)
            nginx.ready(4)
        finally:
            server.stop()


def test_a_restarted_nginx_is_followed_and_a_stopped_one_is_told(tmp_path: Path) -> None:
    with hooked(tmp_path) as (nginx, rest, _):
        cores(rest, "down", "deflate", 2.0)
        os.kill(nginx.pid, signal.SIGQUIT)
        nginx.process.wait(60)
        status, body = rest.send("GET", "/deflation/v1/capabilities")
        assert status == 503, body
        again = Nginx(nginx.directory, nginx.config.read_text().splitlines()[0])
        try:
            again.ready(2)
            assert rest.capabilities()["resources"]["cpu_cores"]["current"] == 2
            cores(rest, "up", "reinflate", 4.0)
            assert len(again.workers()) == 4
        finally:
            again.stop()


def test_a_process_that_is_no_nginx_is_refused(tmp_path: Path) -> None:
    adapter = NginxAdapter(["nginx"], str(tmp_path / "w"), os.getpid, 4, 4.0)
    with pytest.raises(ApplicationError, match="no master of nginx"):
        adapter.capabilities()


def test_the_command_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    with hooked(tmp_path) as (nginx, _, workers_file):
        port = free_port()
        command = [sys.executable, "-m", "app_adapters", "nginx", "--config", str(nginx.config), "--cores", "2"]
        command += ["--prefix", str(nginx.directory), "--pid-file", str(nginx.pid_file), "--workers", "4"]
        command += ["--workers-file", str(workers_file), "--minimum-workers", "2"]
        command += ["--listen", f"127.0.0.1:{port}", "--token-file", str(tmp_path / "token")]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        try:
            assert process.stderr is not None
            assert b"nginx on 127.0.0.1" in process.stderr.readline()
            rest = Rest(("127.0.0.1", port), "t")
            sizes = rest.capabilities()["resources"]["cpu_cores"]
            assert sizes == {"current": 2, "minimum": 1, "maximum": 2, "step": 0.5}
            cores(rest, "down", "deflate", 0.0)
            assert len(nginx.workers()) == 2
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.communicate()

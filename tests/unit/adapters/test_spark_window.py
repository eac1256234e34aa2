"""One decision for all VMs: the window as a state machine, in faked time; and the service around it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app_adapters.errors import AdapterError, ApplicationError
from app_adapters.main import build_parser, main
from app_adapters.registry import ready
from app_adapters.spark.policy import SELF, VM_LEVEL, Deflation, Job
from app_adapters.spark.relay import HostState, Relay
from app_adapters.spark.rest import Application, Cluster, SparkRest, Worker
from app_adapters.spark.service import SparkService
from app_adapters.spark.window import Decide, Read, Windows

HALF = Deflation(0.5, 0.5, 2.0)
NONE = Deflation(0.0, 0.0, 2.0)


# --- the state machine ------------------------------------------------------------------------------------------------


def test_the_first_request_opens_a_window_and_the_time_closes_it() -> None:
    windows = Windows(2.0)
    assert windows.asked("a", HALF, 10.0) == (1, [Read(1)])
    assert windows.asked("b", HALF, 11.0) == (1, [])
    assert windows.closes_s() == 12.0
    assert windows.passed(11.9) == []
    (order,) = windows.passed(12.0)
    assert order == Decide(1, ("a", "b"), {"a": HALF, "b": HALF})
    assert windows.passed(13.0) == []
    assert windows.asked("a", HALF, 14.0) == (2, [Read(2)])


def test_it_closes_early_when_every_vm_that_the_master_knows_has_asked() -> None:
    windows = Windows(2.0)
    windows.asked("a", HALF, 0.0)
    assert windows.known(1, {"a": 2.0, "b": 2.0}, 0.1) == []
    _, instructions = windows.asked("b", HALF, 0.2)
    assert [type(one) for one in instructions] == [Decide]


def test_it_does_not_close_early_before_the_master_was_read() -> None:
    windows = Windows(2.0)
    windows.known(0, {"a": 2.0}, 0.0)
    assert windows.asked("a", HALF, 1.0)[1] == [Read(1)]
    assert len(windows.known(1, {"a": 2.0}, 1.1)) == 1


def test_the_vector_has_all_vms_those_that_lost_something_earlier_with_that() -> None:
    windows = Windows(2.0)
    windows.set_deflation("b", Deflation(0.0, 0.5, 2.0))
    windows.asked("a", HALF, 0.0)
    windows.known(1, {"a": 2.0, "c": 4.0}, 0.1)
    (order,) = windows.passed(2.0)
    assert isinstance(order, Decide)
    assert order.vector == {"a": HALF, "b": Deflation(0.0, 0.5, 2.0), "c": Deflation(0.0, 0.0, 4.0)}
    windows.set_deflation("b", NONE)
    windows.asked("a", HALF, 5.0)
    windows.known(2, {"a": 2.0, "c": 4.0}, 5.1)
    (order,) = windows.passed(7.0)
    assert isinstance(order, Decide)
    assert set(order.vector) == {"a", "c"}


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 1)), max_size=40))
def test_every_request_is_decided_exactly_once(steps: list[tuple[str, float]]) -> None:
    windows, now_s, asked, decided = Windows(2.0), 0.0, {}, []
    for host, wait_s in steps:
        now_s += wait_s
        decided += [one for one in windows.passed(now_s) if isinstance(one, Decide)]
        number, instructions = windows.asked(host, HALF, now_s)
        asked[(number, host)] = now_s
        decided += [one for one in instructions if isinstance(one, Decide)]
    decided += [one for one in windows.passed(now_s + 2) if isinstance(one, Decide)]
    assert sorted((one.window, host) for one in decided for host in one.asking) == sorted(asked)


# --- the service ------------------------------------------------------------------------------------------------------


class Stage(SparkRest):
    """What a cluster of two hosts would answer."""

    def __init__(self, jobs: list[Job] | ApplicationError, delay_s: float = 0.0) -> None:
        super().__init__("http://127.0.0.1:1")
        self.found, self.delay_s = jobs, delay_s

    def cluster(self) -> Cluster:
        workers = tuple(Worker(f"w-{host}", host, "ALIVE", 2) for host in "ab")
        return Cluster(workers, (Application("app", "job", 4),))

    def jobs(self, cluster: Cluster, now_s: float | None = None) -> list[Job]:
        time.sleep(self.delay_s)
        if isinstance(self.found, ApplicationError):
            raise self.found
        return self.found


@contextlib.contextmanager
def serving(directory: Path, rest: SparkRest, window_s: float = 0.3) -> Iterator[SparkService]:
    token = directory / "token"
    token.write_text("secret\n")
    service = SparkService(rest, str(token), port=0, window_s=window_s).start()
    try:
        yield service
    finally:
        service.stop()


def relay(directory: Path, service: SparkService, host: str) -> Relay:
    return Relay(f"http://127.0.0.1:{service.address[1]}", str(directory / "token"), host)


def test_two_vms_get_one_decision(tmp_path: Path) -> None:
    with serving(tmp_path, Stage([Job("als", 0.5, 0.9, cores=4)]), 30.0) as service, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda host: relay(tmp_path, service, host).ask(HALF, 20.0), "ab"))
        assert answers[0] == answers[1]
        own, reason = answers[0]
        assert not own
        assert reason.startswith("VM-level deflation: T_self 2.40 > T_VM 1.50 (2 of 2 VMs deflated")
        (told,) = service.reply("GET", "/spark/v1/decisions", "Bearer secret", b"")[1]["decisions"]
        assert (told["choice"], told["vm_time"], set(told["asking"])) == (VM_LEVEL, 1.5, {"a", "b"})


def test_without_a_running_job_the_answer_is_self_and_the_window_is_not_longer_than_said(tmp_path: Path) -> None:
    with serving(tmp_path, Stage([]), 1.5) as service:
        own, reason = relay(tmp_path, service, "a").ask(HALF, 20.0)
        assert own
        assert "no application is running (1 of 2 VMs" in reason


@pytest.mark.parametrize("rest", [Stage(ApplicationError("the driver of als cannot be asked")), Stage([], 2.0)])
def test_a_cluster_that_cannot_be_read_in_time_is_left_alone(tmp_path: Path, rest: Stage) -> None:
    with serving(tmp_path, rest) as service:
        own, reason = relay(tmp_path, service, "a").ask(HALF, 20.0)
        assert not own
        assert "to be safe" in reason


def test_a_decision_that_comes_too_late_is_kept_for_the_next_attempt(tmp_path: Path) -> None:
    asks = json.dumps({"host": "a", "vm": HALF.vm, "self": HALF.own, "cores": HALF.cores, "wait_s": 0.0}).encode()
    with serving(tmp_path, Stage([])) as service:
        status, answer = service.reply("POST", "/spark/v1/deflations", "Bearer secret", asks)
        assert (status, "not decided in time" in answer["error"]) == (503, True)
        end = time.monotonic() + 30
        while not (told := service.reply("GET", "/spark/v1/decisions", "Bearer secret", b"")[1]["decisions"]):
            assert time.monotonic() < end
            time.sleep(0.02)
        status, answer = service.reply("POST", "/spark/v1/deflations", "Bearer secret", asks)
        assert (status, answer["reason"]) == (200, told[0]["reason"])


def test_a_vm_learns_what_the_master_has_of_it(tmp_path: Path) -> None:
    with serving(tmp_path, Stage([])) as service:
        assert relay(tmp_path, service, "b").state() == HostState(2, 1)
        assert relay(tmp_path, service, "c").state() == HostState(0, 1)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"[]", "body"),
        (b"{", "body"),
        (b'{"host": ""}', "host"),
        (b'{"host": "a", "vm": 2, "self": 0, "cores": 1, "wait_s": 0}', "vm"),
        (b'{"host": "a", "vm": 0, "self": true, "cores": 1, "wait_s": 0}', "self"),
        (b'{"host": "a", "vm": 0, "self": 0, "cores": NaN, "wait_s": 0}', "cores"),
        (b'{"host": "a", "vm": 0, "self": 0, "cores": 1}', "wait_s"),
    ],
)
def test_a_bad_request_is_told_its_field_and_opens_no_window(tmp_path: Path, body: bytes, field: str) -> None:
    with serving(tmp_path, Stage([])) as service:
        status, answer = service.reply("POST", "/spark/v1/deflations", "Bearer secret", body)
        assert (status, answer["error"].startswith(field + ":")) == (400, True)
        assert service.reply("GET", "/spark/v1/decisions", "Bearer secret", b"")[1] == {"decisions": []}


def test_without_the_clusters_token_nothing_is_told_or_decided(tmp_path: Path) -> None:
    with serving(tmp_path, Stage([])) as service:
        (tmp_path / "other").write_text("wrong")
        stranger = Relay(f"http://127.0.0.1:{service.address[1]}", str(tmp_path / "other"), "a")
        for call in (stranger.state, lambda: stranger.tell(HALF), lambda: stranger.ask(HALF, 1.0)):
            with pytest.raises(ApplicationError, match="401"):
                call()
        assert service.reply("GET", "/spark/v1/decisions", "Bearer secret", b"")[1] == {"decisions": []}


# --- the command line -------------------------------------------------------------------------------------------------


def worker(tmp_path: Path, **more: str) -> list[str]:
    options = {
        "--service": "http://127.0.0.1:1",
        "--host": "h",
        "--worker-command": "true --cores 1",
        "--state-file": str(tmp_path / "state"),
        **more,
    }
    return ["spark-worker", *(word for pair in options.items() for word in pair)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"--worker-command": "true --cores 4"}, "--worker-command"),
        ({"--worker-command": "'"}, "--worker-command"),
        ({"--cores": "1.5"}, "--cores"),
        ({"--cores": "0"}, "--cores"),
        ({"--memory-mib": "0"}, "--memory-mib"),
        ({"--host": "a b"}, "--host"),
    ],
)
def test_a_bad_option_is_named(tmp_path: Path, options: dict[str, str], named: str) -> None:
    parsed = build_parser("spark-worker").parse_args(worker(tmp_path, **options))
    with pytest.raises(AdapterError, match=named):
        ready("spark-worker").build(parsed)


def test_options_that_are_no_urls_windows_or_curves_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(worker(tmp_path, **{"--service": "https://somewhere/path"}))
    assert "is not http://HOST:PORT" in capsys.readouterr().err
    for options, named in ((["--window-s", "0"], "--window-s"), (["--curves", str(tmp_path / "none")], "curves")):
        assert main(["spark", *options]) == 2
        assert named in capsys.readouterr().err


def test_the_masters_own_vm_gives_nothing(tmp_path: Path) -> None:
    parsed = build_parser("spark").parse_args(["spark", "--serve", "127.0.0.1:0"])
    adapter: Any = ready("spark").build(parsed)
    try:
        assert adapter.capabilities().resources == {}
        assert "not deflated" in adapter.deflate({"memory_mib": 1.0}, "force", None).reason
        json.dumps(adapter.capabilities().modes)
        before = adapter.service
        assert before is None, "nothing is served before it begins"
        adapter.begin()
    finally:
        adapter.service.stop()


def test_the_choices_are_words_that_the_relay_understands() -> None:
    assert (SELF, VM_LEVEL) == ("self", "vm-level")


# --- what drivers say -------------------------------------------------------------------------------------------------

MOVES = ("decommission", "storage.decommission", "storage.decommission.rddBlocks", "storage.decommission.shuffleBlocks")


class Driver(SparkRest):
    """One application half way, which has passed a shuffle of data on, with these settings."""

    def __init__(self, settings: dict[str, str]) -> None:
        super().__init__("http://127.0.0.1:1")
        self.settings = settings

    def _get(self, base: str, path: str) -> Any:
        if path == "/api/v1/applications":
            return [{"id": "app"}]
        if path.endswith("/environment"):
            return {"sparkProperties": [list(pair) for pair in self.settings.items()]}
        row = {"attemptId": 0, "numTasks": 8, "numCompleteTasks": 8, "name": "map", "inputBytes": 0}
        times = {"submissionTime": "2026-01-01T00:00:00.000GMT", "completionTime": "2026-01-01T00:01:00.000GMT"}
        data = {"shuffleReadBytes": 2**30, "shuffleWriteBytes": 2**30}
        return [{**row, **times, **data, "stageId": number, "status": "COMPLETE"} for number in range(2)]


@pytest.mark.parametrize("off", [None, *MOVES])
def test_nothing_is_computed_again_where_all_that_an_executor_holds_moves_before_it_ends(off: str | None) -> None:
    settings = {f"spark.{name}.enabled": "true" for name in MOVES if name != off} | {"spark.ebbtide.stages": "4"}
    (job,) = Driver(settings).jobs(Cluster((), (Application("app", "als", 4),)))
    assert job.progress == 0.5
    assert (job.recomputed == 0.0) == (off is None)

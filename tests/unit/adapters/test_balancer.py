"""Who is told which weight, when, and what happens where nobody listens."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.errors import ApplicationError
from app_adapters.web import balancer as balancer_module
from app_adapters.web.balancer import (
    Balanced,
    Balancer,
    WeightCommand,
    WeightFile,
    WeightUrl,
    balanced,
    balancer_options,
    weight_for,
)
from tests.adapters.proc import state
from tests.waiting import until_sync

LIMIT_OF_A_COMMAND = "app_adapters.web.balancer.run.__defaults__"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Python alone may start for longer than a command may take."""
    monkeypatch.setattr(LIMIT_OF_A_COMMAND, (60.0,))
    monkeypatch.setattr(balancer_module, "CALL_LIMIT_S", 60.0)


def limit_from(event: Callable[[subprocess.Popen[bytes]], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a command is 0.2 s, and begins when `event` returns, however slow the machine is."""
    communicate = subprocess.Popen.communicate

    def waits(process: subprocess.Popen[bytes], input: bytes | None = None, timeout: float | None = None) -> Any:
        event(process)
        return communicate(process, input, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", waits)
    monkeypatch.setattr(LIMIT_OF_A_COMMAND, (0.2,))


class FourWorkers(Adapter):
    """Four workers of a core each; what it does stands in `happened`, with what the balancer was told."""

    components = ("cpu_cores",)

    def __init__(self, happened: list[str], stuck_at: int = 0) -> None:
        self.cores = 4.0
        self._happened = happened
        self._stuck_at = stuck_at

    def capabilities(self) -> Capabilities:
        return Capabilities("four", "1", {"cpu_cores": SizeRange(self.cores, 1, 4, 1)}, 0, True, ["ask", "force"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        if target["cpu_cores"] >= self.cores:
            return Refusal("it is small already")
        return Promise({"cpu_cores": self.cores - target["cpu_cores"]}, 1, lambda: self._work(target["cpu_cores"]))

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        return Promise({}, 1, lambda: self._work(target["cpu_cores"]))

    def _work(self, cores: float) -> Release:
        before, self.cores = self.cores, max(cores, self._stuck_at)
        self._happened.append(f"cores {self.cores:g}")
        if cores == 0.5:
            raise ApplicationError("it broke")
        return Release({"cpu_cores": max(before - self.cores, 0)}, "counted", "done")


class Told(Balancer):
    def __init__(self, happened: list[str], fails: bool = False) -> None:
        super().__init__("web1")
        self.fails = fails
        self._happened = happened

    def tell(self, weight: int) -> None:
        if self.fails:
            raise ApplicationError("away")
        self._happened.append(f"weight {weight}")


def worked(answer: Answer) -> Release:
    assert isinstance(answer, Promise)
    return answer.work()


def test_the_weight_goes_down_before_the_shrink_and_up_after_the_growth() -> None:
    happened: list[str] = []
    adapter = Balanced(FourWorkers(happened), Told(happened))
    worked(adapter.deflate({"cpu_cores": 1.0}, "ask", Deadline(9)))
    assert happened == ["weight 25", "cores 1"]
    release = worked(adapter.reinflate({"cpu_cores": 4.0}, Deadline(9)))
    assert happened[2:] == ["cores 4", "weight 100"]
    assert "weight 100 of 100" in release.reason


def test_a_shrink_that_gets_half_way_leaves_the_weight_of_what_is_there() -> None:
    happened: list[str] = []
    adapter = Balanced(FourWorkers(happened, stuck_at=3), Told(happened))
    worked(adapter.deflate({"cpu_cores": 1.0}, "ask", Deadline(9)))
    assert happened == ["weight 25", "cores 3", "weight 75"]


def test_a_shrink_that_breaks_leaves_the_weight_of_what_is_there() -> None:
    happened: list[str] = []
    adapter = Balanced(FourWorkers(happened, stuck_at=2), Told(happened))
    with pytest.raises(ApplicationError, match="it broke"):
        worked(adapter.deflate({"cpu_cores": 0.5}, "ask", Deadline(9)))
    assert happened == ["weight 13", "cores 2", "weight 50"]


def test_a_refusal_tells_the_balancer_nothing() -> None:
    happened: list[str] = []
    answer = Balanced(FourWorkers(happened), Told(happened)).deflate({"cpu_cores": 4.0}, "ask", Deadline(9))
    assert isinstance(answer, Refusal)
    assert happened == []


def test_a_balancer_that_is_away_is_a_refusal_where_asked_and_a_note_by_force() -> None:
    happened: list[str] = []
    adapter = Balanced(FourWorkers(happened), Told(happened, fails=True))
    answer = adapter.deflate({"cpu_cores": 1.0}, "ask", Deadline(9))
    assert isinstance(answer, Refusal)
    assert "web1" in answer.reason
    assert "away" in answer.reason
    assert happened == []
    release = worked(adapter.deflate({"cpu_cores": 1.0}, "force", Deadline(9)))
    assert happened == ["cores 1"]
    assert release.complete
    assert release.released == {"cpu_cores": 3}
    assert "could not be lowered" in release.reason
    assert "could not be told" in worked(adapter.reinflate({"cpu_cores": 4.0}, Deadline(9))).reason


def test_a_weight_whose_answer_was_late_is_taken_back_with_the_refusal() -> None:
    happened: list[str] = []

    class Late(Told):
        def tell(self, weight: int) -> None:
            super().tell(weight)
            if weight < 100:
                raise ApplicationError("took longer than 1.5 s")

    answer = Balanced(FourWorkers(happened), Late(happened)).deflate({"cpu_cores": 1.0}, "ask", Deadline(9))
    assert isinstance(answer, Refusal)
    assert happened == ["weight 25", "weight 100"]


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 65535))
def test_a_weight_is_never_zero_and_never_more_than_the_full_one(size: float, largest: float, full: int) -> None:
    assert 1 <= weight_for(size, largest, full) <= full


@pytest.mark.parametrize(("size", "weight"), [(4, 100), (5, 100), (2, 50), (0.01, 1), (0, 1), (-1, 1)])
def test_the_weight_is_the_share_of_the_full_one(size: float, weight: int) -> None:
    assert weight_for(size, 4, 100) == weight


@given(st.floats(0, 100), st.floats(0, 100), st.integers(1, 65535))
def test_what_is_smaller_never_weighs_more(one: float, other: float, full: int) -> None:
    assert weight_for(min(one, other), 100, full) <= weight_for(max(one, other), 100, full)


@pytest.mark.parametrize(
    ("as_nginx", "text"),
    [(True, "server 127.0.0.1:80 weight=7;\n"), (False, '{"name": "127.0.0.1:80", "weight": 7}\n')],
)
def test_the_file_is_replaced_as_a_whole_and_then_read(tmp_path: Path, as_nginx: bool, text: str) -> None:
    path, copy = tmp_path / "weight", tmp_path / "copy"
    reload = [sys.executable, "-c", f"import shutil; shutil.copy({str(path)!r}, {str(copy)!r})"]
    WeightFile("127.0.0.1:80", str(path), as_nginx, reload).tell(7)
    assert path.read_text() == copy.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o644
    assert sorted(one.name for one in tmp_path.iterdir()) == ["copy", "weight"]


@pytest.mark.parametrize("before", ["old\n", None])
def test_a_reload_that_fails_leaves_the_file_as_it_was(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "weight"
    if before is not None:
        path.write_text(before)
    with pytest.raises(ApplicationError, match="no such upstream"):
        WeightFile("a", str(path), False, [sys.executable, "-c", "raise SystemExit('no such upstream')"]).tell(7)
    assert (path.read_text() if path.exists() else None) == before
    with pytest.raises(ApplicationError, match="cannot be written"):
        WeightFile("a", str(tmp_path / "missing" / "weight"), False, []).tell(7)


def test_the_command_gets_name_and_weight_as_words_without_a_shell(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"import json, sys; open({str(out)!r}, 'w').write(json.dumps(sys.argv[1:]))"
    WeightCommand("a;b $(x)", [sys.executable, "-c", script, "{name}", "--w={weight}"]).tell(9)
    assert json.loads(out.read_text()) == ["a;b $(x)", "--w=9"]
    with pytest.raises(ApplicationError, match="cannot be run"):
        WeightCommand("a", [str(tmp_path / "no-program")]).tell(9)


def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMIT_OF_A_COMMAND, (0.2,))
    with pytest.raises(ApplicationError, match=r"took longer than 0\.2 s"):
        WeightCommand("a", [sys.executable, "-c", "import time; time.sleep(600)"]).tell(9)


def test_what_a_command_that_hangs_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    limit_from(lambda process: poll.poll(60_000), monkeypatch)  # what it starts has begun
    with pytest.raises(ApplicationError, match=r"took longer than 0\.2 s"):
        WeightCommand("a", ["sh", "-c", f"(echo begun; exec sleep 600) > {tmp_path}/fifo; true"]).tell(9)
    assert os.read(reader, 100) == b"begun\n"
    assert poll.poll(60_000) == [(reader, select.POLLHUP)]  # nobody holds its other end
    os.close(reader)


def test_a_service_that_a_command_has_started_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It ends, and is not reaped.
    limit_from(lambda process: os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT), monkeypatch)
    with pytest.raises(ApplicationError, match=r"took longer than 0\.2 s"):
        # It has ended, and what it started holds its output.
        WeightCommand("a", ["sh", "-c", f"sleep 600 & echo $! >{tmp_path}/pid"]).tell(9)
    pid = int((tmp_path / "pid").read_text())
    until_sync(lambda: state(pid) != psutil.STATUS_RUNNING, "it is about to sleep")
    found = state(pid)
    os.kill(pid, signal.SIGKILL)
    assert found == psutil.STATUS_SLEEPING


@pytest.mark.parametrize("status", [204, 500])
def test_the_url_gets_name_and_weight(status: int) -> None:
    got: list[object] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        balancer = WeightUrl("web1", f"http://127.0.0.1:{server.server_port}/weights?all=1")
        if status == 204:
            balancer.tell(12)
        else:
            with pytest.raises(ApplicationError, match="answered 500"):
                balancer.tell(12)
    finally:
        server.shutdown()
        server.server_close()
    assert got == [("/weights?all=1", {"name": "web1", "weight": 12})]
    with pytest.raises(ApplicationError, match="cannot be told"):
        balancer.tell(12)


def made(arguments: list[str]) -> Adapter:
    parser = argparse.ArgumentParser()
    balancer_options(parser)
    return balanced(FourWorkers([]), parser.parse_args(arguments))


def test_without_an_option_there_is_no_balancer() -> None:
    assert isinstance(made([]), FourWorkers)
    adapter = made(["--weight-command", "set {name} {weight}"])
    assert isinstance(adapter, Balanced)
    assert adapter.components == ("cpu_cores",)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--weight-url", "http://192.0.2.1/x"], "--weight-url"),
        (["--weight-url", "https://127.0.0.1/x"], "--weight-url"),
        (["--weight-url", "http://127.0.0.1:99999/"], "--weight-url"),
        (["--weight-url", "http://127.0.0.1.example.org/"], "--weight-url"),
        (["--weight-command", "'"], "--weight-command"),
        (["--weight-command", " "], "--weight-command"),
        (["--weight-file", "/nonexistent/x/y"], "--weight-file"),
        (["--weight-reload", "true"], "--weight-reload"),
        (["--weight-file", "w", "--weight-name", "a; b"], "--weight-name"),
    ],
)
def test_bad_options_are_told_by_name(arguments: list[str], option: str) -> None:
    with pytest.raises(ApplicationError, match=option):
        made(arguments)


@pytest.mark.parametrize("weight", ["0", "-1", "x", "65536", "1.5"])
def test_a_bad_weight_is_told(weight: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused: Callable[[], Adapter] = lambda: made(["--weight", weight])  # noqa: E731
    with pytest.raises(SystemExit):
        refused()
    assert "--weight" in capsys.readouterr().err

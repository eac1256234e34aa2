"""The gunicorn adapter against a real gunicorn, through the REST hook."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app_adapters.adapter import Deadline, Promise
from app_adapters.errors import ApplicationError
from app_adapters.processes.process_memory import read_pid
from app_adapters.server import HookServer
from app_adapters.web.gunicorn import GunicornAdapter
from app_adapters.web.gunicorn_control import find_control
from tests.adapters.cache import free_port
from tests.adapters.proc import children, pss_mib
from tests.adapters.rest import Rest
from tests.adapters.web_load import WebLoad
from tests.adapters.web_pool import Record, answered, cores, ten_cycles, to_one_worker_and_back
from tests.adapters.web_servers import Gunicorn
from tests.waiting import until_sync

pytestmark = pytest.mark.service

WAYS = {
    "control socket, sync workers": (),
    "control socket, threads": ("--worker-class", "gthread", "--threads", "4"),
    "signals, sync workers": ("--no-control-socket",),
    "signals, threads": ("--no-control-socket", "--worker-class", "gthread", "--threads", "4"),
}


def adapter_of(gunicorn: Gunicorn, **more: object) -> GunicornAdapter:
    return GunicornAdapter(lambda: read_pid(str(gunicorn.pid_file)), 4.0, **more)  # type: ignore[arg-type]


@contextlib.contextmanager
def hooked(
    tmp_path: Path, options: tuple[str, ...] = (), workers: int = 4, mib: int = 12, **more: object
) -> Iterator[tuple[Gunicorn, Rest]]:
    """A gunicorn of 4 cores, and the hook of its adapter."""
    token = tmp_path / "token"
    token.write_text("t")
    gunicorn = Gunicorn(tmp_path / "gunicorn", options, workers, mib)
    try:
        gunicorn.ready()
        until_sync(
            gunicorn.asleep, "the end of the start"
        )  # a worker takes a MiB more after it has loaded the application
        server = HookServer(adapter_of(gunicorn, **more), port=0, token_file=str(token)).start()
        try:
            yield gunicorn, Rest(server.address, "t")
        finally:
            server.stop()
    finally:
        gunicorn.stop()


@pytest.mark.parametrize("way", WAYS)
def test_workers_go_and_come_back_while_every_request_is_answered(
    tmp_path: Path, way: str, record_property: Record
) -> None:
    with hooked(tmp_path, WAYS[way]) as (gunicorn, rest), WebLoad(gunicorn.port) as load:
        answer, freed_mib = to_one_worker_and_back(gunicorn, rest, load, 3 * 12, 4, lambda: None, gunicorn.ready)
    assert answer["promised"]["memory_mib"] == pytest.approx(freed_mib, rel=0.2, abs=6)
    answered(load, way, record_property)


@pytest.mark.parametrize("way", ["control socket, sync workers", "signals, sync workers"])
def test_ten_cycles_leave_workers_and_memory_as_they_were(tmp_path: Path, way: str) -> None:
    with hooked(tmp_path, WAYS[way], mib=4) as (gunicorn, rest), WebLoad(gunicorn.port) as load:
        ten_cycles(gunicorn, rest, load, 4, gunicorn.ready)
        assert len(gunicorn.workers()) == 4
    assert load.errors == []


def test_a_memory_target_takes_as_many_workers_as_it_leaves_no_room_for(tmp_path: Path) -> None:
    with hooked(tmp_path) as (gunicorn, rest):
        memory = rest.capabilities()["resources"]["memory_mib"]
        before_mib = gunicorn.pss_mib()
        assert rest.target("down", "deflate", before_mib - 15)[0] == 202
        done = rest.finished("down")
        assert len(gunicorn.workers()) == (3 if memory["step"] > 15 else 2)
        assert gunicorn.pss_mib() <= before_mib - 15 + 3
        assert done["released"]["memory_mib"] == pytest.approx(before_mib - gunicorn.pss_mib(), rel=0.1, abs=4)
        # Its own maximum restores all; of cores and memory the lesser counts.
        both = {"memory_mib": memory["maximum"], "cpu_cores": 1.0}
        rest.target("both", "deflate", 0, target=both)
        rest.finished("both")
        assert len(gunicorn.workers()) == 1
        rest.target("up", "reinflate", rest.capabilities()["resources"]["memory_mib"]["maximum"])
        rest.finished("up")
        assert len(gunicorn.workers()) == 4


def test_preloaded_memory_is_not_counted_once_per_worker(tmp_path: Path) -> None:
    with hooked(tmp_path, ("--preload",), mib=60) as (gunicorn, rest):
        memory = rest.capabilities()["resources"]["memory_mib"]
        before_mib = gunicorn.pss_mib()
        assert memory["current"] == pytest.approx(before_mib, rel=0.1, abs=3)
        assert memory["step"] < 40  # the 60 MiB stay with the others
        _, answer = rest.target("down", "deflate", 0, target={"cpu_cores": 1.0})
        done = rest.finished("down")
        freed_mib = before_mib - gunicorn.pss_mib()
        assert 0 < freed_mib < 60
        assert done["released"]["memory_mib"] == pytest.approx(freed_mib, rel=0.1, abs=4)
        assert answer["promised"]["memory_mib"] == pytest.approx(freed_mib, rel=0.3, abs=6)


@pytest.mark.parametrize("way", ["control socket, sync workers", "signals, sync workers"])
def test_a_worker_that_still_serves_is_reported_as_not_released_and_finishes(tmp_path: Path, way: str) -> None:
    with hooked(tmp_path, WAYS[way], workers=2) as (gunicorn, rest):
        # Both workers are busy, so the one that is to go is.
        slow = [WebLoad(gunicorn.port, "/slow/6", threads=1) for _ in range(2)]
        with slow[0], slow[1]:
            until_sync(lambda: gunicorn.slow_workers() == gunicorn.workers(), "a request in each worker")
            for one in slow:
                one.stop()
            done = cores(rest, "down", "deflate", 2.0, deadline_s=3)
            assert "1 workers still finish their requests" in str(done["reason"])
            assert (done["state"], done["released"]["cpu_cores"]) == ("failed", 0)
            assert len(gunicorn.workers()) == 2
        assert [error for one in slow for error in one.errors] == []
        gunicorn.wait_for_workers(1)
        assert rest.capabilities()["resources"]["cpu_cores"]["current"] == 2
        cores(rest, "up", "reinflate", 4.0)
        assert len(gunicorn.workers()) == 2


@pytest.mark.parametrize("restarted", [False, True], ids=["the same adapter", "a new adapter"])
def test_a_worker_that_was_told_to_end_is_there_again_when_the_deflation_is_called_off(
    tmp_path: Path, restarted: bool
) -> None:
    gunicorn = Gunicorn(tmp_path / "gunicorn", WAYS["signals, sync workers"], mib=1, workers=2)
    state = tmp_path / "state"
    try:
        gunicorn.ready()
        old = gunicorn.workers()
        adapter = adapter_of(gunicorn, state_dir=str(state))
        slow = [WebLoad(gunicorn.port, "/slow/10", threads=1) for _ in range(2)]
        with slow[0], slow[1]:
            until_sync(lambda: gunicorn.slow_workers() == old, "a request in each worker")
            for one in slow:
                one.stop()
            deadline = Deadline(60)
            down = adapter.deflate({"cpu_cores": 2.0}, "ask", deadline)
            assert isinstance(down, Promise)
            work = threading.Thread(target=down.work)
            work.start()
            until_sync(lambda: "ttou" in gunicorn.log.read_text(), "the signal")
            deadline.cancel()
            work.join(30)
            assert gunicorn.workers() == old
            if restarted:
                adapter = adapter_of(gunicorn, state_dir=str(state))
            for _ in range(2):  # told again, it is not asked for one more
                up = adapter.reinflate({"cpu_cores": 4.0}, Deadline(60))
                assert isinstance(up, Promise)
                assert up.work().complete
        until_sync(lambda: set(old) != set(gunicorn.workers()), "the end of one of them")
        gunicorn.wait_for_workers(2)
        assert gunicorn.log.read_text().count("ttin") == 1
        assert list(state.iterdir()) == []
    finally:
        gunicorn.stop()


@pytest.mark.parametrize("way", ["control socket, sync workers", "signals, sync workers"])
def test_a_reload_goes_back_to_the_configured_workers_and_is_told(tmp_path: Path, way: str) -> None:
    with hooked(tmp_path, WAYS[way], mib=1) as (gunicorn, rest):
        cores(rest, "down", "deflate", 2.0)
        old = gunicorn.workers()
        os.kill(gunicorn.pid, signal.SIGHUP)
        until_sync(lambda: len(gunicorn.workers()) == 4 and not set(old) & set(gunicorn.workers()), "the reload")
        assert rest.capabilities()["resources"]["cpu_cores"]["current"] == 4
        _, answer = rest.target("again", "deflate", 0, target={"cpu_cores": 2.0})
        assert "has 4 workers, 2 were set: it was reloaded" in answer["reason"]
        rest.finished("again")
        assert len(gunicorn.workers()) == 2
        _, answer = rest.target("up", "reinflate", 0, target={"cpu_cores": 4.0})
        assert "reloaded" not in answer["reason"]
        rest.finished("up")


@pytest.mark.parametrize("way", ["control socket, sync workers", "signals, sync workers"])
def test_workers_that_its_owner_has_taken_stay_away_where_nothing_was_taken(tmp_path: Path, way: str) -> None:
    with hooked(tmp_path, WAYS[way], mib=1) as (gunicorn, rest):
        assert rest.capabilities()["resources"]["cpu_cores"]["current"] == 4
        os.kill(gunicorn.pid, signal.SIGTTOU)
        gunicorn.wait_for_workers(3)
        _, answer = rest.target("up", "reinflate", 0, target={"cpu_cores": 4.0})
        assert "nothing had been taken" in answer["reason"]
        rest.finished("up")
        assert len(gunicorn.workers()) == 3
        cores(rest, "down", "deflate", 1.0)
        assert len(gunicorn.workers()) == 1
        for again in ("up+2", "up+3"):
            cores(rest, again, "reinflate", 4.0)
            assert len(gunicorn.workers()) == 3


def says(master: int, workers: int) -> bool:
    control = find_control(master)
    try:
        return control is not None and control.stats().target == workers
    except ApplicationError:
        return False


@pytest.mark.parametrize("before", ["started more", "reloaded it"])
def test_workers_that_its_owner_takes_stay_away_once_all_was_given_back_whoever_did_it(
    tmp_path: Path, before: str
) -> None:
    with hooked(tmp_path, mib=1) as (gunicorn, rest):
        if before == "started more":
            os.kill(gunicorn.pid, signal.SIGTTIN)
            gunicorn.wait_for_workers(5)
        cores(rest, "down", "deflate", 2.0)
        assert len(gunicorn.workers()) == 2
        if before == "started more":
            cores(rest, "up", "reinflate", 4.0)
        else:
            os.kill(gunicorn.pid, signal.SIGHUP)
        gunicorn.wait_for_workers(4)
        # By gunicorn's own word, which it does not give while it forks.
        until_sync(lambda: says(gunicorn.pid, 4), "gunicorn's own number")
        assert rest.capabilities()["resources"]["cpu_cores"]["current"] == 4
        os.kill(gunicorn.pid, signal.SIGTTOU)
        gunicorn.wait_for_workers(3)
        _, answer = rest.target("again", "reinflate", 0, target={"cpu_cores": 4.0})
        assert "nothing had been taken" in answer["reason"]
        rest.finished("again")
        assert len(gunicorn.workers()) == 3


def test_an_upgraded_gunicorn_is_followed_by_its_pid_file(tmp_path: Path) -> None:
    with hooked(tmp_path, mib=1, workers=2) as (gunicorn, rest):
        cores(rest, "down", "deflate", 2.0)
        os.kill(gunicorn.pid, signal.SIGUSR2)
        until_sync(lambda: gunicorn.pid_file.with_name("pid.2").exists(), "the new master")
        new = read_pid(str(gunicorn.pid_file.with_name("pid.2")))
        until_sync(lambda: len(children(new)) == 2, "its workers")
        assert rest.capabilities()["resources"]["cpu_cores"]["current"] == 2  # a new master is no worker
        os.kill(gunicorn.pid, signal.SIGTERM)
        gunicorn.process.wait(60)
        until_sync(lambda: gunicorn.pid_file.exists() and read_pid(str(gunicorn.pid_file)) == new, "its pid file")
        try:
            assert rest.capabilities()["resources"]["cpu_cores"]["current"] == 4
            _, answer = rest.target("again", "deflate", 0, target={"cpu_cores": 2.0})
            assert f"gunicorn is process {new} now" in answer["reason"]
            done = rest.finished("again")
            assert done["state"] == "released", done["reason"]
            assert len(children(new)) == 1
        finally:
            os.kill(new, signal.SIGTERM)
            until_sync(lambda: not Path(f"/proc/{new}").exists() or not children(new), "its end")


def test_a_control_socket_that_was_taken_away_for_good_leaves_the_signals(tmp_path: Path) -> None:
    with hooked(tmp_path, mib=1) as (gunicorn, rest):
        cores(rest, "down", "deflate", 3.0)
        (gunicorn.directory / "control.ctl").unlink()
        for workers in (2, 1):  # the first finds out that it is gone, the second knows
            done = cores(rest, f"to-{workers}", "deflate", float(workers))
            assert done["state"] == "released", done["reason"]
            assert len(gunicorn.workers()) == workers
        cores(rest, "up", "reinflate", 4.0)
        assert len(gunicorn.workers()) == 4


def test_the_minimum_of_workers_is_kept_and_is_the_floor(tmp_path: Path) -> None:
    with hooked(tmp_path, mib=1, minimum_workers=2) as (gunicorn, rest):
        cores(rest, "down", "deflate", 0.0)
        assert len(gunicorn.workers()) == 2
        status, answer = rest.target("more", "deflate", 1)
        assert (status, answer["state"], answer["floor"]["cpu_cores"]) == (409, "refused", 2)
        assert answer["floor"]["memory_mib"] == pytest.approx(gunicorn.pss_mib(), rel=0.1, abs=3)
        assert "its minimum is 2" in answer["reason"]


def test_a_full_size_that_only_the_configuration_file_tells_outlives_the_adapter(tmp_path: Path) -> None:
    gunicorn = Gunicorn(tmp_path / "gunicorn", ("--no-control-socket",), mib=1, in_file=True)
    state = tmp_path / "state"
    try:
        gunicorn.ready()
        down = adapter_of(gunicorn, state_dir=str(state)).deflate({"cpu_cores": 1.0}, "ask", Deadline(60))
        assert isinstance(down, Promise)
        assert down.work().complete
        assert len(gunicorn.workers()) == 1
        later = adapter_of(gunicorn, state_dir=str(state))
        assert later.capabilities().resources["cpu_cores"].current == 1
        up = later.reinflate({"cpu_cores": 4.0}, Deadline(60))
        assert isinstance(up, Promise)
        assert up.work().complete
        assert len(gunicorn.workers()) == 4
        assert list(state.iterdir()) == []
    finally:
        gunicorn.stop()


def test_a_full_size_is_forgotten_once_there_are_as_many_workers_as_before(tmp_path: Path) -> None:
    gunicorn = Gunicorn(tmp_path / "gunicorn", ("--no-control-socket",), mib=1, in_file=True)
    state = tmp_path / "state"
    try:
        gunicorn.ready()
        adapter = adapter_of(gunicorn, state_dir=str(state))
        assert adapter.capabilities().resources["cpu_cores"].current == 4
        os.kill(gunicorn.pid, signal.SIGTTOU)  # its owner
        gunicorn.wait_for_workers(3)
        down = adapter.deflate({"cpu_cores": 1.0}, "ask", Deadline(60))
        assert isinstance(down, Promise)
        assert down.work().complete
        assert list(state.iterdir()) != []
        up = adapter.reinflate({"cpu_cores": 4.0}, Deadline(60))
        assert isinstance(up, Promise)
        assert up.work().complete
        assert len(gunicorn.workers()) == 3
        assert list(state.iterdir()) == []
    finally:
        gunicorn.stop()


def test_an_adapter_that_cannot_write_down_the_full_size_gives_workers_all_the_same(tmp_path: Path) -> None:
    gunicorn = Gunicorn(tmp_path / "gunicorn", ("--no-control-socket",), mib=1, in_file=True)
    try:
        gunicorn.ready()
        adapter = adapter_of(gunicorn, state_dir="/proc/ebbtide")
        down = adapter.deflate({"cpu_cores": 1.0}, "ask", Deadline(60))
        assert isinstance(down, Promise)
        assert down.work().complete
        assert len(gunicorn.workers()) == 1
        up = adapter.reinflate({"cpu_cores": 4.0}, Deadline(60))
        assert isinstance(up, Promise)
        assert up.work().complete
        assert len(gunicorn.workers()) == 4
    finally:
        gunicorn.stop()


def test_an_adapter_whose_state_turns_read_only_gives_workers_back_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gunicorn = Gunicorn(tmp_path / "gunicorn", ("--no-control-socket",), mib=1, in_file=True)
    state, unlink = tmp_path / "state", os.unlink

    def read_only(path: str) -> None:
        if str(path).startswith(str(state)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path)

    try:
        gunicorn.ready()
        adapter = adapter_of(gunicorn, state_dir=str(state))
        down = adapter.deflate({"cpu_cores": 1.0}, "ask", Deadline(60))
        assert isinstance(down, Promise)
        assert down.work().complete
        monkeypatch.setattr(os, "unlink", read_only)
        up = adapter.reinflate({"cpu_cores": 4.0}, Deadline(60))
        assert isinstance(up, Promise)
        assert up.work().complete
        assert len(gunicorn.workers()) == 4
        later = adapter.deflate({"cpu_cores": 4.0}, "ask", Deadline(60))
        assert "Read-only file system" in later.reason
    finally:
        gunicorn.stop()


def test_processes_that_are_no_gunicorn_are_refused_and_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=-1)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        adapter = GunicornAdapter(lambda: other.pid, 1.0)
        with pytest.raises(ApplicationError, match="is no master of gunicorn"):
            adapter.deflate({"cpu_cores": 1.0}, "force", Deadline(5))
        assert other.poll() is None
    finally:
        other.kill()
        other.communicate()
    with pytest.raises(ApplicationError, match="there is no process"):
        adapter.capabilities()
    missing = tmp_path / "pid"
    with pytest.raises(ApplicationError, match="pid file"):
        GunicornAdapter(lambda: read_pid(str(missing)), 1.0).capabilities()


def test_the_command_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    gunicorn = Gunicorn(tmp_path / "gunicorn", mib=1, workers=2).ready()
    port = free_port()
    command = [sys.executable, "-m", "app_adapters", "gunicorn", "--pid-file", str(gunicorn.pid_file), "--cores", "2"]
    command += ["--listen", f"127.0.0.1:{port}", "--token-file", str(tmp_path / "token")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert b"gunicorn on 127.0.0.1" in process.stderr.readline()
        rest = Rest(("127.0.0.1", port), "t")
        assert rest.capabilities()["resources"]["cpu_cores"]["current"] == 2
        cores(rest, "down", "deflate", 1.0)
        assert len(gunicorn.workers()) == 1
        assert pss_mib([gunicorn.pid]) > 0
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
        gunicorn.stop()

"""One benchmark at a time, what a killed one left behind, and what else runs on the machine."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks import runner
from benchmarks.figures import BenchmarkFailed, Figure
from benchmarks.host import alone, beside, swapfile
from benchmarks.matching.slurm_cluster import USER, SlurmCluster
from benchmarks.passes import Pass
from tests.waiting import until_sync


def test_one_benchmark_runs_at_a_time_whatever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def another(how: Pass) -> dict[str, Figure]:
        runner.run("policies", how)
        return {}

    monkeypatch.setattr(runner, "ALL", {**runner.ALL, "cpu": another})
    with pytest.raises(BenchmarkFailed, match="another benchmark is at work"):
        runner.run("cpu")
    assert runner.run("policies", Pass(quick=True))["name"] == "policies"


def test_a_lock_is_not_held_by_what_was_forked_beneath_it() -> None:
    asked = os.pipe()
    with alone.alone(print):
        if (pid := os.fork()) == 0:
            os.read(asked[0], 1)
            os._exit(0)
    with alone.alone(print):
        os.write(asked[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0
    for end in asked:
        os.close(end)


def test_who_may_remove_guests_and_swap_is_alone_in_all_network_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with alone.alone(print):
        # A name that is taken in one namespace is free in the next.
        monkeypatch.setattr(alone, "LOCK", f"{alone.LOCK}-elsewhere")
        with pytest.raises(BenchmarkFailed, match="another benchmark is at work"), alone.alone(print):
            pass
    with alone.alone(print):
        pass


# --- what a killed one leaves ----------------------------------------------------------------------------------------


def test_what_a_killed_benchmark_left_running_is_ended_and_nothing_else() -> None:
    """Its runner, which was killed, started one process in a session of its own."""
    runs = (
        "import os, subprocess, sys; from benchmarks.host.alone import BEARS, runner\n"
        "os.environ[BEARS] = runner(os.getpid())\n"
        "subprocess.Popen([sys.executable, '-c', 'input()'], start_new_session=True, stdin=0)\n"
        "print('begun', flush=True); input()"
    )
    with contextlib.ExitStack() as stack:
        for_others = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        stack.callback(for_others.wait)
        stack.callback(for_others.kill)
        run = subprocess.Popen([sys.executable, "-c", runs], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert run.stdout is not None
        run.stdout.readline()
        (left,) = psutil.Process(run.pid).children()
        said: list[str] = []
        alone.end_left_over(said.append)
        assert left.is_running()
        run.kill()
        run.wait()
        alone.end_left_over(said.append)
        assert not left.is_running()
        assert any(f"process {left.pid} " in sentence for sentence in said)
        assert for_others.poll() is None


def test_what_another_container_or_boot_has_is_never_left_over() -> None:
    mine = alone.runner(os.getpid())
    place, pid, ticks = mine.rsplit(":", 2)
    assert not alone.is_left_over(mine)
    assert alone.is_left_over(f"{place}:{pid}:{int(ticks) + 1}")
    assert not alone.is_left_over(f"elsewhere:1:{pid}:{int(ticks) + 1}")
    for borne in ("", "x", f"{place}:{pid}", f"{place}:{pid}:now"):
        assert not alone.is_left_over(borne)


def test_a_process_that_cannot_be_looked_at_is_not_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    place, pid, ticks = alone.runner(os.getpid()).rsplit(":", 2)
    gone: OSError = ProcessLookupError(errno.ESRCH, "gone")
    real = alone.runner

    def runner_of(asked: int) -> str:
        if asked == os.getpid():
            return real(asked)
        raise gone

    monkeypatch.setattr(alone, "runner", runner_of)
    other = f"{place}:{int(pid) + 1}:{ticks}"
    assert alone.is_left_over(other)
    gone = OSError(errno.EMFILE, "too many open files")
    assert not alone.is_left_over(other)


def test_nothing_is_ended_where_proc_shows_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readlink", lambda path: str(os.getpid() + 1))
    with pytest.raises(BenchmarkFailed, match="another pid namespace"):
        alone.end_left_over(print)


@pytest.mark.skipif(not os.path.exists("/proc/self/ns/time"), reason="this kernel has no time namespaces")
def test_what_another_time_namespace_has_is_never_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock shifts when a process began."""
    boot, spaces, pid, ticks = alone.runner(os.getpid()).split(":")
    assert spaces.split(".")[1] == str(os.stat("/proc/self/ns/time").st_ino)
    assert not alone.is_left_over(f"{boot}:{spaces}0:{pid}:{int(ticks) + 1}")


@pytest.mark.service
def test_programs_of_slurm_bear_the_mark_of_their_benchmark_and_so_do_those_that_write_over_their_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(alone.BEARS, f"test-of-{os.getpid()}")
    with SlurmCluster(1, 2) as cluster:
        cluster.command("sbatch", f"--uid={USER}", "--chdir=/", "--output=/dev/null", "--wrap", "sleep 300")
        wanted = {"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd", "sleep"}

        def marked() -> bool:
            mine = (one for one in psutil.process_iter(["name"]) if alone.borne_by(one.pid) == os.environ[alone.BEARS])
            return wanted <= {one.info["name"] for one in mine}

        until_sync(marked, limit_s=60.0)


def test_programs_of_slurm_bear_no_mark_without_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(alone.BEARS, "mine")
    assert list(SlurmCluster().environment)[-1] == alone.BEARS
    monkeypatch.delenv(alone.BEARS)
    assert alone.BEARS not in SlurmCluster().environment


def test_swap_that_a_killed_benchmark_left_goes_before_any_other_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    left = swapfile.place()
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"x")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    runner.run("policies", Pass(quick=True))
    assert not left.exists()


def test_the_end_of_its_terminal_ends_a_benchmark_in_order_and_its_busy_loops() -> None:
    runs = (
        "import signal, time; from benchmarks.host.bench_host import terminable\n"
        "from benchmarks.deflating.neighbours import busy_loops\n"
        # As ignored as it is by the tests where these run under nohup, it would be left so.
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "with terminable(), busy_loops(1):\n    print('begun', flush=True); time.sleep(60)"
    )
    for number in (signal.SIGHUP, signal.SIGKILL):
        run = subprocess.Popen([sys.executable, "-c", runs], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert run.stdout is not None
        run.stdout.readline()
        (loop,) = psutil.Process(run.pid).children()
        run.send_signal(number)
        run.wait(30)
        assert psutil.wait_procs([loop], 30)[1] == []


def test_reports_to_a_terminal_that_is_gone_do_not_end_what_is_put_back() -> None:
    def gone(sentence: str) -> None:
        raise OSError("Input/output error")

    runner.still_reporting(Pass(report=gone)).report("removing the guests")


# --- what runs beside ------------------------------------------------------------------------------------------------


def test_cpu_time_of_others_is_counted_once_with_children_that_have_ended() -> None:
    shell, child, other, orphan = (10, 1), (11, 2), (12, 3), (13, 4)
    before = {
        shell: beside.Seen(1, 1.0, 5.0), child: beside.Seen(10, 3.0, 0.0), orphan: beside.Seen(1, 7.0, 0.0),
        (1, 0): beside.Seen(0, 1.0, 100.0),
    }  # fmt: skip
    # The child went on for a second and ended; the orphan is init's, whose children may have been ours.
    after = {shell: beside.Seen(1, 1.5, 9.0), other: beside.Seen(10, 0.25, 0.0), (1, 0): beside.Seen(0, 1.0, 120.0)}
    assert beside.others_s(before, after) == 0.5 + 1.0 + 0.25


def test_what_a_child_and_its_own_child_took_before_they_ended_is_not_counted_again() -> None:
    shell, make, compiler = (10, 1), (11, 2), (12, 3)
    before = {shell: beside.Seen(1, 1.0, 0.0), make: beside.Seen(10, 2.0, 1.0), compiler: beside.Seen(11, 30.0, 0.0)}
    # All but the shell have ended; the compiler took two seconds more.
    assert beside.others_s(before, {shell: beside.Seen(1, 1.0, 35.0)}) == 2.0


def test_what_a_child_took_that_nobody_waited_for_hides_nothing_of_what_else_ran() -> None:
    parent, child, other = (10, 1), (11, 2), (12, 3)
    before = {parent: beside.Seen(1, 1.0, 0.0), child: beside.Seen(10, 500.0, 0.0), other: beside.Seen(1, 5.0, 0.0)}
    after = {parent: beside.Seen(1, 1.0, 0.0), other: beside.Seen(1, 15.0, 0.0)}
    assert beside.others_s(before, after) == 10.0


def test_a_watch_tells_the_mean_and_the_busiest_window_and_nothing_of_a_moment() -> None:
    assert beside.Watch([(0.5, 0.5)]).found is None
    found = beside.Watch([(1.0, 10.0), (8.0, 10.0), (0.1, 0.1)]).found
    assert found == {"mean_cores": round(9.1 / 20.1, 3), "most_cores": 0.8, "every_s": beside.EVERY_S}


def test_what_belongs_to_a_benchmark_does_not_run_beside_it() -> None:
    with contextlib.ExitStack() as stack:
        pids = []
        for mine in (True, False):
            child = subprocess.Popen(
                [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, **({"EBB_MARK": "1"} if mine else {})},
            )  # fmt: skip
            stack.callback(child.wait)
            stack.callback(child.kill)
            assert child.stdout is not None
            child.stdout.readline()
            pids.append(child.pid)
        seen = {pid for pid, _ in beside.Others(0, b"EBB_MARK=1").look()}
        assert pids[0] not in seen
        assert pids[1] in seen
        # What the runner has started is its own, whatever it bears.
        assert not {pid for pid, _ in beside.Others(os.getpid(), b"EBB_MARK=1").look()} & {*pids, os.getpid()}


def test_what_ran_beside_stands_in_the_file_of_a_benchmark() -> None:
    with beside.watching("EBB_MARK=1") as found:
        assert not found
        until_s = time.monotonic() + beside.LEAST_S + 0.1
        while time.monotonic() < until_s:
            pass
    assert set(found) == {"mean_cores", "most_cores", "every_s"}

"""Starting and stopping processes by pid and start time: a reused pid is never hit, a name never searched for."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ebbtide.lab.errors import LabError
from ebbtide.lab.state import Process

#: How long a daemon may take to end after SIGTERM.
TERM_S = 10.0
_POLL_S = 0.05

#: Children of this very process, which has to fetch them when they end.
_children: dict[int, subprocess.Popen[bytes]] = {}
#: Exit codes of those that were fetched.
_exit_codes: dict[int, int] = {}


def start(name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Process:
    """Start a process in a session of its own, its output appended to ``log``. Raises LabError."""
    try:
        with log.open("ab") as output:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(os.environ) | dict(environment or {}),
                cwd="/",
            )
    except OSError as error:
        raise LabError(f"{name} could not be started: {error}") from error
    _children[child.pid] = child
    return recorded(name, child.pid)


def recorded(name: str, pid: int) -> Process:
    """The record of a running process. Raises LabError if there is none."""
    try:
        ticks, boot = _began(pid)
    except psutil.NoSuchProcess as error:
        raise LabError(f"{name} (pid {pid}) ended at once") from error
    return Process(name=name, pid=pid, ticks=ticks, boot=boot)


def _began(pid: int) -> tuple[int, str]:
    """When a process was started, and the boot of the kernel that this counts from. Raises psutil.NoSuchProcess."""
    try:
        # proc_pid_stat(5): field 22; the second one is a name in brackets, which may hold spaces and brackets.
        ticks = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    return ticks, Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def running(process: Process | None) -> psutil.Process | None:
    """The living process of a record; None if it has ended, is a zombie, or its pid belongs to another one."""
    if process is None:
        return None
    if process.pid in _children and (code := _children[process.pid].poll()) is not None:
        del _children[process.pid]
        _exit_codes[process.pid] = code
        return None
    try:
        found = psutil.Process(process.pid)
        if process.created is not None:
            same = abs(found.create_time() - process.created) <= 0.05
        else:
            same = _began(process.pid) == (process.ticks, process.boot)
        if not same or found.status() == psutil.STATUS_ZOMBIE:
            return None
    except psutil.NoSuchProcess:
        return None
    return found


def how_ended(process: Process) -> str:
    """How a process that does not run any more came to its end, as far as its parent can tell."""
    running(process)  # Collects the status of one that has ended since the last look.
    code = _exit_codes.get(process.pid)
    if code is None:
        return "ended, its exit status is not known"
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def stop(processes: Sequence[Process], term_s: float = TERM_S) -> list[str]:
    """SIGTERM to all, then SIGKILL to those that have not ended after ``term_s`` seconds.

    Returns the names of those that had to be killed. Raises LabError if one survives even that.
    """
    for process in processes:
        _signal(process, kill=False)
    stubborn = _wait(processes, term_s)
    for process in stubborn:
        _signal(process, kill=True)
    if left := _wait(stubborn, term_s):
        raise LabError(f"{left[0].name} (pid {left[0].pid}) does not end, not even by SIGKILL")
    return [process.name for process in stubborn]


def _wait(processes: Sequence[Process], limit_s: float) -> list[Process]:
    """Those that still run after ``limit_s`` seconds."""
    deadline_s = time.monotonic() + limit_s
    while left := [process for process in processes if running(process)]:
        if time.monotonic() >= deadline_s:
            return left
        time.sleep(_POLL_S)
    return []


def _signal(process: Process, *, kill: bool) -> None:
    found = running(process)
    if found is None:
        return
    try:
        # psutil holds the start time against the pid again before it sends.
        if kill:
            found.kill()
        else:
            found.terminate()
    except psutil.NoSuchProcess:
        return


def tail(log: Path, lines: int = 5) -> str:
    """The end of a log, for an error message."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""

"""One benchmark at a time on a machine, with what killed ones left behind removed.

All processes that a benchmark starts bear BEARS in their environment: who ran it. Where that process is no more, they
are left over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil

from benchmarks.figures import BenchmarkFailed
from benchmarks.host import swapfile
from ebbtide.lab import paths
from ebbtide.lab.cluster import Lab
from ebbtide.lab.services import SERVICES

BEARS = "EBB_BENCH_RUN"
#: A name of Linux's abstract sockets: free again when its holder ends, however it does, and anybody may ask for it.
#: Each network namespace has its own, so that root, who removes guests and swap, also locks a file beside these.
LOCK = "\0ebbtide-benchmark"
NAMESPACES = ("/proc/self/ns/pid", "/proc/self/ns/time")
END_S = 10.0
#: A lab stops those that it started, once no domain needs them any more.
SPARED = frozenset(service.argv[0] for service in SERVICES)
_held: list[socket.socket | IO[bytes]] = []


def _let_go() -> None:
    """A forked worker that lives on must not hold the lock."""
    for lock in _held:
        lock.close()


os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def alone(report: Callable[[str], None]) -> Iterator[str]:
    """Be the only benchmark on this machine; gives what all its processes bear.

    Raises BenchmarkFailed where another one is at work, or where what a killed one left behind cannot be removed;
    OSError where there can be no lock.
    """
    # First, since what is left over must not keep others out.
    end_left_over(report)
    with contextlib.ExitStack() as stack:
        try:
            _lock(stack)
        except OSError as error:
            # EAGAIN: of the file.
            if error.errno not in (errno.EADDRINUSE, errno.EAGAIN):
                raise
            raise BenchmarkFailed("another benchmark is at work on this machine") from error
        before = os.environ.get(BEARS)
        os.environ[BEARS] = mine = runner(os.getpid())
        try:
            if os.geteuid() == 0:
                lab_of_benchmarks(report).down()
                swapfile.clear(swapfile.place())
            yield mine
        finally:
            del os.environ[BEARS]
            if before is not None:
                os.environ[BEARS] = before


def _lock(stack: contextlib.ExitStack) -> None:
    """Raises OSError."""
    _hold(stack, name := socket.socket(socket.AF_UNIX))
    name.bind(LOCK)
    if os.geteuid() == 0:
        path = paths.state_dir().with_name("bench.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        _hold(stack, file := path.open("ab"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _hold(stack: contextlib.ExitStack, lock: socket.socket | IO[bytes]) -> None:
    stack.enter_context(lock)
    _held.append(lock)
    stack.callback(_held.remove, lock)


def lab_of_benchmarks(report: Callable[[str], None]) -> Lab:
    """Of benchmarks with guests."""
    return Lab(paths.state_dir().with_name("bench"), report)


def runner(pid: int) -> str:
    """What the processes of this one's benchmarks bear: its name is not given again, and no other container has it.

    Raises OSError where there is no such process.
    """
    ticks = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Ticks are told by the clock of the time namespace; an old kernel has one only.
    places = [os.stat(path).st_ino for path in map(Path, NAMESPACES) if path.exists()]
    return f"{boot}:{'.'.join(map(str, places))}:{pid}:{ticks}"


def is_left_over(borne: str) -> bool:
    """Whether the process that ran it, of this very container, is known to be no more."""
    words = borne.split(":")
    if len(words) != 4 or not (words[2] + words[3]).isdecimal():
        return False
    if runner(os.getpid()).split(":")[:2] != words[:2]:
        return False
    try:
        return runner(int(words[2])) != borne
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        # Not known, so it stays.
        return False


def end_left_over(report: Callable[[str], None]) -> None:
    """End what ended benchmarks have left running, each process by its own mark. Raises BenchmarkFailed."""
    if os.readlink("/proc/self") != str(os.getpid()):
        raise BenchmarkFailed("/proc shows the processes of another pid namespace: mount this one's own")
    left = []
    for process in psutil.process_iter(["name"]):
        if process.info["name"] in SPARED or not is_left_over(borne_by(process.pid)):
            continue
        with contextlib.suppress(psutil.Error):
            process.kill()
            left.append(process)
            report(f"process {process.pid} ({process.info['name']}), left by a benchmark that has ended, was killed")
    if staying := psutil.wait_procs(left, END_S)[1]:
        raise BenchmarkFailed(f"of a benchmark that has ended {', '.join(str(one.pid) for one in staying)} still run")


def borne_by(pid: int) -> str:
    """What a process bears, if anything that may be read."""
    head = f"{BEARS}=".encode()
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((entry.removeprefix(head).decode(errors="replace") for entry in entries if entry.startswith(head)), "")

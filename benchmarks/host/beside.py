"""What else runs on the machine while something is measured, in cores: told by a small process of its own.

Counted is the CPU time of processes that neither belong to the benchmark nor to the kernel, whose own threads are at
work for it as well. What such processes' children took counts when they have waited for these; one of init's that
begins and ends between two looks goes uncounted. Run as a program, without the packages: it must cost next to nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

EVERY_S = 2.0
#: Windows shorter than this say nothing, at a clock of a hundredth of a second.
LEAST_S = 1.0
INIT, KTHREADD = 1, 2
#: Guests of benchmarks, by the name that libvirt gives QEMU: their host is `bench-...` (benchmarks.host.bench_host).
GUEST = b"guest=ebb-bench-"


@dataclass(frozen=True)
class Seen:
    """One process: its parent, its own CPU seconds, and those of children that it has waited for."""

    parent: int
    own_s: float
    children_s: float


@dataclass
class Watch:
    """What was found so far: CPU seconds of others and how long that took, of each window."""

    windows: list[tuple[float, float]] = field(default_factory=list)

    @property
    def found(self) -> dict[str, float] | None:
        """None where it was too short to tell."""
        total_s = sum(took_s for _, took_s in self.windows)
        if total_s < LEAST_S:
            return None
        long_enough = [(others_s, took_s) for others_s, took_s in self.windows if took_s >= LEAST_S]
        mean = sum(others_s for others_s, _ in self.windows) / total_s
        most = max((others_s / took_s for others_s, took_s in long_enough), default=mean)
        return {"mean_cores": round(mean, 3), "most_cores": round(max(most, mean), 3), "every_s": EVERY_S}


def others_s(before: Mapping[tuple[int, int], Seen], after: Mapping[tuple[int, int], Seen]) -> float:
    """CPU seconds between two looks at all processes that are not ours, by pid and start.

    A child that has ended counts by what its parent has waited for, less what it counted for itself before.
    """
    seconds = 0.0
    there = {pid for pid, _ in after}
    parents = {pid: seen.parent for (pid, _), seen in before.items()}
    passed_s: dict[int, float] = {}
    for key, gone in before.items():
        if key not in after:
            # It is now in what the next of those that it came of, and that goes on, has waited for.
            heir = next((pid for pid in lineage(gone.parent, parents) if pid in there), INIT)
            passed_s[heir] = passed_s.get(heir, 0.0) + gone.own_s + gone.children_s
    for key, now in after.items():
        earlier = before.get(key, Seen(now.parent, 0.0, 0.0))
        seconds += now.own_s - earlier.own_s
        if key[0] != INIT:
            # Less than was passed on to it where it does not wait for its children.
            seconds += max(now.children_s - earlier.children_s - passed_s.get(key[0], 0.0), 0.0)
    return max(seconds, 0.0)


class Others:
    """Looks at all processes that are not ours."""

    def __init__(self, runner: int, mark: bytes) -> None:
        self._runner = runner
        self._mark = mark
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        #: What bears the mark, or is a guest, or does not, by pid and start.
        self._known: dict[tuple[int, int], bool] = {}

    def look(self) -> dict[tuple[int, int], Seen]:
        all_: dict[tuple[int, int], Seen] = {}
        for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
            with contextlib.suppress(OSError):
                # proc_pid_stat(5), from field 3 on: the second is a name in brackets, which may hold spaces.
                words = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
                own, children = (int(words[at]) + int(words[at + 1]) for at in (11, 13))
                all_[pid, int(words[19])] = Seen(int(words[1]), own * self._tick_s, children * self._tick_s)
        self._known = {key: self._known[key] if key in self._known else self._ours(key[0]) for key in all_}
        parents = {pid: seen.parent for (pid, _), seen in all_.items()}
        mine = {pid for (pid, start) in all_ if self._known[pid, start]} | {self._runner, KTHREADD}
        return {key: seen for key, seen in all_.items() if mine.isdisjoint(lineage(key[0], parents))}

    def _ours(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return self._mark in _read(f"/proc/{pid}/environ").split(b"\0") or GUEST in _read(f"/proc/{pid}/cmdline")
        return False


def lineage(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    """A process and those that it comes of."""
    while pid:
        yield pid
        pid = parents.get(pid, 0)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@contextlib.contextmanager
def watching(mark: str) -> Iterator[dict[str, Any]]:
    """Watch for a while; at the end the dictionary has what was found, if it was long enough.

    :param mark: ``NAME=VALUE`` in the environment of all processes of the benchmark.
    """
    # A session of its own: Ctrl-C is not for it, and it ends with its input.
    command = [sys.executable, "-P", __file__, mark]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert watch.stdout is not None
    watch.stdout.readline()  # it has begun
    found: dict[str, Any] = {}
    try:
        yield found
    finally:
        found.update(json.loads(watch.communicate()[0] or b"null") or {})


def main() -> None:
    others, watch = Others(os.getppid(), sys.argv[1].encode()), Watch()
    before, began_s = others.look(), time.monotonic()
    print(flush=True)
    while True:
        ended = bool(select.select([sys.stdin], [], [], EVERY_S)[0])
        after, now_s = others.look(), time.monotonic()
        watch.windows.append((others_s(before, after), now_s - began_s))
        before, began_s = after, now_s
        if ended:
            break
    print(json.dumps(watch.found))


if __name__ == "__main__":
    main()

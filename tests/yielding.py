"""What has no real guests and no services yields to what has: guests are the longest chain of a run, and they are
emulated; services and their clients have time limits of their own.

Nice values do not reach across sessions where the kernel groups tasks by session (autogroup), and a guest is in a group
of libvirt's. So all other processes, with what they start, are in one group of the run's own with half the weight of
one such group. On cgroup v1 as root only; elsewhere nice values have to do.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

CONTROLLER = Path("/sys/fs/cgroup/cpu")
#: The group of a run, in the environment of its processes.
VARIABLE = "EBB_TEST_GROUP"
#: Half of what every group has that nobody has given another weight.
SHARES = "512"


class Group:
    """Made by the process that leads a run, and removed by it."""

    def __init__(self) -> None:
        self._path = CONTROLLER / f"ebbtide-tests-{os.getpid()}"

    def pytest_sessionstart(self) -> None:
        with contextlib.suppress(OSError):
            self._path.mkdir()
            (self._path / "cpu.shares").write_text(SHARES)
            os.environ[VARIABLE] = str(self._path)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        # What is still in it has been told of as left behind.
        with contextlib.suppress(OSError):
            self._path.rmdir()


def enter(yields: bool) -> None:
    """Put this process, and what it starts from now on, among those that yield, or back where it was started."""
    group = os.environ.get(VARIABLE)
    if group is None:
        return
    target = Path(group) if yields else CONTROLLER / _STARTED_IN
    with contextlib.suppress(OSError):
        (target / "cgroup.procs").write_text(str(os.getpid()))


def _started_in(groups: str) -> str:
    """The group of a process in the hierarchy of ``cpu``, relative to its top.

    :param groups: of ``/proc/self/cgroup``: https://man7.org/linux/man-pages/man7/cgroups.7.html
    """
    rows = (line.split(":", 2) for line in groups.splitlines())
    return next((path.lstrip("/") for _, controllers, path in rows if "cpu" in controllers.split(",")), "")


_STARTED_IN = _started_in(Path("/proc/self/cgroup").read_text())

"""What all tests share."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from app_adapters import server

#: What wants most of the machine, or whose times depend on it: one after another, when all else is done.
ALONE = ("chaos", "engines", "faults", "guests")
GROUP = "alone"
#: One after another, too, beside nothing but what waits most of its time: those of the others that come first.
SERVERS = "adapters"
PATIENT = "engines"
#: The same of other rooms: one measures, one finds more of what it looks for the more real threads wait for a CPU.
ALONE_FILES = ("tests/cli/test_memcached_benchmark.py", "tests/hostagent/test_rules_stateful.py")
#: A loop is compiled once for all of these, in the first minutes of a fresh machine.
COMPILED = ("simulator",)

# In CI the same examples every time: what fails there fails here, too. Everywhere else the search goes on at random.
settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real guests are for tests that are alone: whoever shares the machine with another one is told."""
    for item in items:
        if item.get_closest_marker("guest") is not None and scope_of(item.nodeid) != GROUP:
            raise pytest.UsageError(f"{item.nodeid} has real guests: it belongs into one of {', '.join(ALONE)}")
    items.sort(key=lambda item: room_of(item.nodeid) != PATIENT)


def room_of(nodeid: str) -> str:
    return nodeid.split("/")[1]


def scope_of(nodeid: str) -> str:
    """What stays together in one process: a file, all that is to be alone, all that compiles the same loops."""
    file, room = nodeid.partition("::")[0], room_of(nodeid)
    if room in ALONE or file in ALONE_FILES:
        return GROUP
    return room if room in (*COMPILED, SERVERS) else file


class AloneLast(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """For ``-n 2 --dist loadfile``: what takes longest begins first; what is to be alone begins last."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        for scope in COMPILED:
            if scope in self.workqueue:
                self.workqueue.move_to_end(scope, last=False)
        for scope in (SERVERS, GROUP):
            if scope in self.workqueue:
                self.workqueue.move_to_end(scope)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return AloneLast(config, log) if config.getvalue("dist") == "loadfile" else None


class OneSession:
    """Real guests of one session of tests at a time on a machine: there is one libvirtd, which a test restarts, and one
    swap, which tests bring and take away.

    The second session waits, whatever started it. Outside of the tests' own time limits.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def take(self, report: Callable[[str], None]) -> None:
        """Wait for it, once; it is held until this process ends."""
        if self._file is not None:
            return
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            report(
                f"waiting for the guests of another session of tests ({file.read().strip() or 'it does not say whose'})"
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()}\n")
        file.flush()
        self._file = file


ONE_SESSION = OneSession(Path("/run/lock/ebbtide-test-guests"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("guest") is not None and os.geteuid() == 0:
        ONE_SESSION.take(lambda sentence: warnings.warn(sentence, stacklevel=2))
    return (yield)


@pytest.fixture(autouse=True)
def quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of hook servers are stopped here, one in a guest's life."""
    monkeypatch.setattr(server, "STOP_LOOK_S", 0.02)

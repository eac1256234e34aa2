"""What all tests share."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

from app_adapters import server

#: What wants most of the machine, or whose times depend on it: one after another, when all else is done.
ALONE = ("adapters", "chaos", "engines", "faults", "guests")
GROUP = "alone"
TESTS = Path(__file__).parent

# In CI the same examples every time: what fails there fails here, too. Everywhere else the search goes on at random.
settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """For ``-n 2 --dist loadgroup``: files stay together, and what is to be alone is one group."""
    for item in items:
        path = item.path.relative_to(TESTS)
        alone = path.parts[0] in ALONE or item.get_closest_marker("guest") is not None
        item.add_marker(pytest.mark.xdist_group(GROUP if alone else str(path)))
    # Before xdist reads the groups.
    yield


class AloneLast(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
    """The group that is to be alone goes to one process when nothing else is left to begin."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if GROUP in self.workqueue:
            self.workqueue.move_to_end(GROUP)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadGroupScheduling | None:
    return AloneLast(config, log) if config.getvalue("dist") == "loadgroup" else None


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

"""What all tests share."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from app_adapters import server
from tests import left_behind, yielding
from tests.room_times import RoomTimes, room_of
from tests.waiting import tasks_under_way

HERE = Path(__file__).parent
#: Rooms with real guests, one test after another: they want a core, and there is one libvirtd.
GUEST_ROOMS = ("faults", "guests")
GUESTS = "guests"
#: Beside them: what mostly waits for services of its own, or measures them, one test after another.
SERVICE_ROOMS = ("adapters", "chaos", "engines")
#: With the guests: they bring swap for the whole machine, and guests' tests say what happens with and without it.
SWAP_FILES = ("tests/benchmarks/test_benchmark_jvm.py", "tests/benchmarks/test_memcached_benchmark.py")
SERVICES = "services"
#: A loop is compiled once for all of these, in the first minutes of a fresh machine.
COMPILED = ("simulator",)
#: What a run begins with, the longest chain first; the files that take longest follow, so that none is left to the end.
FIRST = (
    GUESTS,
    SERVICES,
    *COMPILED,
    "tests/lint/test_lint.py",
    "tests/manager/execution/test_crash.py",
    "tests/manager/test_real_agent.py",
    "tests/hostagent/test_rules_stateful.py",
    "tests/manager/execution/test_lifecycle_crash.py",
    "tests/manager/execution/test_migrations.py",
    "tests/manager/api/test_conformance.py",
)
#: How much the others yield to the longest chain and to the processes it starts (nice values; root only), beside what
#: tests/yielding.py does.
NICE = {GUESTS: 0, SERVICES: 5}
NICE_OF_OTHERS = 10
#: What `make check` leaves out, to end within some two minutes, beside guests, services, and single tests that wait for
#: two seconds and more, which are marked where they stand: rooms, files, and tests that start a manager.
SLOW_ROOMS = (*GUEST_ROOMS, *SERVICE_ROOMS, *COMPILED, "clients")
SLOW_FILES = (
    "tests/benchmarks/test_benchmark_jvm.py",
    "tests/benchmarks/test_benchmark_matcher.py",
    "tests/benchmarks/test_benchmark_parts.py",
    "tests/benchmarks/test_benchmarks.py",
    "tests/cli/test_api_coverage.py",
    "tests/cli/test_command_line_faults.py",
    "tests/cli/test_conformance_command.py",
    "tests/cli/test_core_alone.py",
    "tests/cli/test_declared.py",
    "tests/cli/test_every_command.py",
    "tests/cli/test_explain.py",
    "tests/cli/top/test_terminal.py",
    "tests/cluster/test_sequences.py",
    "tests/deploy/test_prometheus_files.py",
    "tests/fuzz/test_parsers.py",
    "tests/guestagent/test_bad_hooks.py",
    "tests/hostagent/api/test_conformance.py",
    "tests/hostagent/operations/test_lifecycle_stateful.py",
    "tests/hostagent/test_rogue_guest.py",
    "tests/hostagent/test_rules_stateful.py",
    "tests/hostagent/vm/test_guestlink_stopped.py",
    "tests/manager/plans/test_plans.py",
    "tests/manager/tasks/test_learning.py",
    "tests/manager/test_backup.py",
    "tests/matcher/match/test_match_cache.py",
    "tests/matcher/predict/test_memory.py",
    "tests/matcher/predict/test_period.py",
    "tests/matcher/predict/test_predictor.py",
    "tests/packages/test_ansible.py",
    "tests/rest/test_broken_files.py",
    "tests/rest/test_compatibility.py",
    "tests/rest/test_openapi.py",
    "tests/unit/deflation/cascade/test_interleavings.py",
    "tests/unit/deflation/cascade/test_operations.py",
    "tests/unit/deflation/placement/test_placement_kernels.py",
    "tests/unit/deflation/sharing/test_proportional.py",
    "tests/vagrant/test_files.py",
)
MANAGER = "each_store"
#: What a manager does does not differ by its kind of store: on PostgreSQL the manager's tests are deep ones.
#: But for these: of the store itself, of what stands in its queries, of a manager that dies in the middle.
ONE_STORE = "tests/manager/"
BOTH_STORES = (
    "tests/manager/api/test_event_stream.py",
    "tests/manager/execution/test_crash.py::test_a_manager_killed_at_every_record",
    "tests/manager/execution/test_crash.py::test_a_real_manager_killed_at_random",
    "tests/manager/execution/test_lifecycle_crash.py::test_a_manager_killed_at_every_record",
    "tests/manager/history/test_keeping.py",
    "tests/manager/inventory/test_lists.py",
    "tests/manager/plans/test_arrivals_together.py",
    "tests/manager/plans/test_retention.py",
    "tests/manager/store/",
    "tests/manager/tasks/test_learning.py",
    "tests/manager/test_backup.py",
)

#: A test with real parts that fails is tried once more, since four such tests share two cores. The first failure is
#: printed whole and counted in the closing line. Not tried again is what was too slow for its time limit, and what
#: chaos found to be broken (tests/chaos/checks.py).
SECOND_TRY = pytest.mark.flaky(reruns=1, rerun_except=[r"Timeout \(>", "^Violated:"])

#: Memory that a process of the tests should have at most, and what each of a run had; MiB.
MOST_MIB = 2048
PEAKS: dict[str, int] = {}
#: After so much growth, MiB, what ended is looked for.
GROWN_MIB = 100
RESIDENT = {"collected_at": 0}

# No example is timed: a busy machine takes long for any. In CI the same examples every time: what fails there fails
# here, too. Everywhere else the search goes on at random.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Rooms of which `make check` wants nothing are not imported for it: that is a third of its start."""
    without_slow = "not slow" in config.getoption("markexpr")
    return True if without_slow and collection_path.parent == HERE and collection_path.name in SLOW_ROOMS else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real guests are for the rooms whose tests run one after another."""
    for item in items:
        if item.get_closest_marker("guest") is not None and scope_of(item.nodeid) != GUESTS:
            raise pytest.UsageError(f"{item.nodeid} has real guests: it belongs into {' or '.join(GUEST_ROOMS)}")
        if is_slow(item):
            item.add_marker(pytest.mark.slow)
        if has_real_parts(item):
            item.add_marker(SECOND_TRY)
        if item.nodeid.startswith(ONE_STORE) and not item.nodeid.startswith(BOTH_STORES) and on_postgresql(item):
            item.add_marker(pytest.mark.deep)


def on_postgresql(item: pytest.Item) -> bool:
    """Whether a test of `each_store` is the one on PostgreSQL."""
    call = getattr(item, "callspec", None)
    return call is not None and call.params.get(MANAGER) == "postgresql"


def is_slow(item: pytest.Item) -> bool:
    file, room = item.nodeid.partition("::")[0], room_of(item.nodeid)
    return room in SLOW_ROOMS or file in SLOW_FILES or MANAGER in getattr(item, "fixturenames", ())


def has_real_parts(item: pytest.Item) -> bool:
    """Whether guests, services or daemons decide, beside the code, when something happens."""
    real = room_of(item.nodeid) in (*GUEST_ROOMS, *SERVICE_ROOMS)
    return real or any(map(item.get_closest_marker, ("guest", "service")))


def scope_of(nodeid: str) -> str:
    """What stays together in one process: guests and swap, services, what compiles the same loops, or else a file."""
    file, room = nodeid.partition("::")[0], room_of(nodeid)
    if room in GUEST_ROOMS or file in SWAP_FILES:
        return GUESTS
    if room in SERVICE_ROOMS:
        return SERVICES
    return room if room in COMPILED else file


class LongestFirst(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """For ``--dist loadfile``: tests mostly wait, for guests, services and time limits, so there are more processes
    than cores, and the longest chain of them goes first."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        for scope in reversed(FIRST):
            if scope in self.workqueue:
                self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


def pytest_configure(config: pytest.Config) -> None:
    """A run in the background of a shell ignores SIGINT; the processes that tests start and interrupt must not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A handler is not inherited, as SIG_IGN is.
        signal.signal(signal.SIGINT, lambda number, frame: None)
    if left_behind.VARIABLE not in os.environ:
        config.pluginmanager.register(left_behind.Check(), "left-behind")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RoomTimes(), "room-times")
        if config.getoption("numprocesses", None) and os.geteuid() == 0:
            config.pluginmanager.register(yielding.Group(), "yielding")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What all tests have imported is for good: Python's collector need not look through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return LongestFirst(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["peak_mib"] = peak_mib()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController, error: object) -> None:
    found = getattr(node, "workeroutput", {}).get("peak_mib")
    if found is not None:
        PEAKS[node.gateway.id] = found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what failed before it passed or failed again, and how much memory each process had at most."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"tried again: {report.nodeid}", sep="_", yellow=True)
        terminalreporter.write_line(report.longreprtext)
    for name, found in (PEAKS or {"this process": peak_mib()}).items():
        over = f", more than the {MOST_MIB} MiB that fit a laptop" if found > MOST_MIB else ""
        terminalreporter.write_line(f"memory of {name}: {found} MiB at most{over}")


def peak_mib() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


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
    if os.geteuid() == 0:
        if item.get_closest_marker("guest") is not None:
            ONE_SESSION.take(lambda sentence: warnings.warn(sentence, stacklevel=2))
        if hasattr(item.config, "workerinput"):
            scope = scope_of(item.nodeid)
            os.setpriority(os.PRIO_PROCESS, 0, NICE.get(scope, NICE_OF_OTHERS))
            yielding.enter(scope not in NICE)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and "Timeout (>" in str(call.excinfo.value) and (tasks := tasks_under_way()):
        report.sections.append(("tasks of asyncio that were under way", tasks))
    return report


@pytest.fixture(autouse=True)
def quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of hook servers are stopped here, one in a guest's life."""
    monkeypatch.setattr(server, "STOP_LOOK_S", 0.02)


@pytest.fixture(autouse=True)
def umask_of_a_user() -> Generator[None]:
    """A daemon's ``main`` in this process makes it stricter; the next test is not to live on that."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def what_ended_is_freed() -> Generator[None]:
    """Keeps a process small: a manager's arrays weigh 30 MiB, and nothing for Python's collector.

    aiohttp holds the last 1,024 applications in a cache of their middlewares, each with all that it serves.
    """
    yield
    aiohttp = sys.modules.get("aiohttp.web_app")
    if aiohttp is not None:
        aiohttp._cached_build_middleware.cache_clear()
    if resident_mib() > RESIDENT["collected_at"] + GROWN_MIB:
        gc.collect()
        RESIDENT["collected_at"] = resident_mib()


def resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 2**20

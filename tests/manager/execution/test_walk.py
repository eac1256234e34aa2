"""The walk of a placement through the manager's files, as docs/internals/walks.md tells it."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import pytest

import cluster_manager
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent

pytestmark = pytest.mark.usefixtures("each_store")

ROOM: Final = Path(cluster_manager.__file__).parent
PAGE: Final = ROOM.parent / "docs/internals/walks.md"
DRIVE, PERFORM = ("execution/operations.py", "_drive"), ("execution/instruction_executor.py", "perform")
NEXT, SAVE = ("plans/placements.py", "next_step"), ("store/store.py", "save_step")
WALK: Final = [
    ("api/vms.py", "create"),
    ("execution/operations.py", "create"),
    ("plans/placements.py", "start_placement"),
    ("store/store.py", "add_plan"),
    *(DRIVE, PERFORM, ("execution/host_ranking.py", "choose"), NEXT, SAVE),
    *(PERFORM, NEXT, SAVE),
]
#: The means: what carries a request, a command or a write, what counts or traces, and questions about the hosts.
MEANS: Final = (
    *("api/forms.py", "api/standby.py", "execution/plan_log.py", "execution/plan_spans.py", "execution/plan_totals.py"),
    *("inventory/", "leadership/", "manager.py", "store/"),
)
WRITES: Final = (("store/store.py", "add_plan"), SAVE)
#: Functions that only compute what their names say; those of the queries of reports and of running plans all do.
COMPUTING: Final = {
    *("finished", "internal", "read_next", "host_of", "having", "instruct", "finish", "also"),
    *("fresh_at_host", "without_paused", "forgiving", "may_reclaim", "notices_of", "preempted_by"),
    *("lined_up", "hold_s", "claim", "reserved", "changed", "home", "<lambda>", "accepts", "near"),
}
ALL_COMPUTING: Final = ("plans/report_queries.py", "execution/running_plans.py")


class Arrivals:
    """Files that are entered from another one, with the function, by one request and its plan."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self._begun: list[FrameType] = []
        self._tasks: set[asyncio.Task[Any] | None] = set()

    @contextmanager
    def followed(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not _is_ours(code) or any(frame is begun for begun in self._begun):
            return
        task, name = asyncio.current_task(), code.co_name
        if name == "create" and code.co_filename.endswith("api/vms.py"):
            self._tasks.add(task)
        if task not in self._tasks and not (task is not None and task.get_name().startswith("plan ")):
            return
        # A coroutine that goes on has begun before: kept, so that no other frame has its place in memory.
        self._begun.append(frame)
        caller = frame.f_back
        while caller is not None and not _is_ours(caller.f_code):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename != code.co_filename:
            self.found.append((str(Path(code.co_filename).relative_to(ROOM)), name))

    def stays(self) -> list[tuple[str, str]]:
        """By the rule of the page."""
        walked = [at for at in self.found if at in WRITES or not at[0].startswith(MEANS)]
        return [(file, name) for file, name in walked if name not in COMPUTING and file not in ALL_COMPUTING]


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(f"{ROOM}/")


async def placed(cluster: Cluster, name: str) -> None:
    operation = await cluster.create(vm(name, cpu_cores=1.0, memory_mib=400.0))
    assert operation.state is OperationState.DONE, operation


async def test_a_placement_into_free_room_stays_where_the_page_says(tmp_path: Path) -> None:
    arrivals, agent = Arrivals(), FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        # The first command to an agent proves its address.
        await placed(cluster, "low-1")
        with arrivals.followed():
            await placed(cluster, "low-2")
    assert arrivals.stays() == WALK
    said = re.search(r"^\| `POST /v1/vms` \|.* (\d+) in (\d+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert said is not None
    assert (int(said[1]), int(said[2])) == (len(WALK), len({file for file, _ in WALK}))


async def test_a_placement_into_free_room_is_stored_three_times_and_reads_its_host_twice(tmp_path: Path) -> None:
    arrivals, agent = Arrivals(), FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent) as cluster:
        # The first command to an agent proves its address.
        await placed(cluster, "low-1")
        reads = agent.reads
        with arrivals.followed():
            await placed(cluster, "low-2")
        assert agent.reads - reads == 2, "before the start is decided, and after it"
    names = [name for file, name in arrivals.found if file == "store/store.py"]
    assert [name for name in names if name in ("add_plan", "save_step")] == ["add_plan", "save_step", "save_step"]

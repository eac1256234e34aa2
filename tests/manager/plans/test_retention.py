"""Pruning: what is old goes, and what somebody may still ask for or acknowledge stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import structlog

from cluster_manager.defaults import DAY_S, Retention
from cluster_manager.inventory.housekeeping import Housekeeping
from cluster_manager.plans.placements import start_placement
from cluster_manager.plans.plans import Note, SetVM, VMPhase, finish
from cluster_manager.plans.removals import RemovalPlan, start_removal
from cluster_manager.store.caution import LOOKS
from cluster_manager.store.database import Database
from cluster_manager.store.pruning import statements
from cluster_manager.store.store import Store
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.machines import CoreChange
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec
from tests.manager.cluster import cluster_of, vm
from tests.manager.databases import rows_of
from tests.manager.fake_agent import FakeAgent
from tests.manager.plan_events import happen
from tests.waiting import until

KEEP = Retention(age_s=30 * DAY_S, most_events=1000, batch=3, pause_s=0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def names(database: Database, table: str, column: str) -> list[object]:
    return [value for (value,) in rows_of(database, f"SELECT {column} FROM {table} ORDER BY {column}")]


async def removal(store: Store, name: str, host: str | None, phase: VMPhase | None, owed: bool = False) -> RemovalPlan:
    """A VM with a deletion's plan, which has ended where there is a phase."""
    spec = VMSpec.model_validate(vm(name))
    placed = start_placement(f"plan-{name}", f"request-{name}", spec, 1.0, PlacementPolicy.BEST_FIT)
    await store.add_plan(placed, "")
    await store.save_step(placed, [SetVM(name, VMPhase.RUNNING, host, "")])
    state = start_removal(placed.id, placed.request_id, name, host or "")
    if phase is not None:
        step = finish(state, OperationState.DONE, "gone").also(
            SetVM(name, phase, host, "", owed), Note("deleted", name, host, "gone")
        )
        await store.save_step(step.state, step.effects)
    return state


def report(host: str) -> HostReport:
    size = Vector(cpu_cores=1, memory_mib=1)
    return HostReport(
        id=host, url="http://x", incarnation="one", capacity=size, free=size, deflatable=size, accelerator="qemu",
        vm_overhead_mib=0.0, vms=(), core_changes=(),
    )  # fmt: skip


async def test_old_rows_go_and_what_is_under_way_owed_or_unheard_of_stays(database: Database) -> None:
    clock = Clock()
    store = Store(database, clock)
    await store.open()
    await store.save_hosts([report("silent")])
    clock.now = DAY_S
    for number in range(7):
        await removal(store, f"old-{number}", "heard", VMPhase.ENDED)
    await removal(store, "unheard", "silent", VMPhase.ENDED)
    await removal(store, "owed", "heard", VMPhase.FAILED, owed=True)
    await removal(store, "running", "heard", None)
    clock.now = 20 * DAY_S
    await store.save_hosts([report("heard")])
    clock.now = 25 * DAY_S
    await removal(store, "young", "heard", VMPhase.ENDED)
    clock.now = 40 * DAY_S
    gone = await Housekeeping(store, KEEP, clock).prune()
    assert gone == {"events": 9, "plans": 9, "vms": 7}
    assert names(database, "vms", "name") == ["owed", "running", "unheard", "young"]
    assert names(database, "plans", "id") == ["plan-running", "plan-young"]
    assert names(database, "events", "vm") == ["young"]
    assert await Housekeeping(store, KEEP, clock).prune() == {}
    await store.close()


@pytest.mark.parametrize("known_by", ["the manager before", "a look before"])
async def test_a_look_with_a_clock_that_is_ahead_deletes_nothing(database: Database, known_by: str) -> None:
    clock = Clock()
    store = Store(database, clock)
    await store.open()
    for name in ("one", "other"):
        await removal(store, name, "heard", VMPhase.ENDED)
    clock.now = DAY_S
    await store.save_hosts([report("heard")])
    housekeeping = Housekeeping(store, KEEP, clock)
    assert await housekeeping.prune() == {}
    clock.now += 400 * DAY_S
    if known_by == "the manager before":
        await store.close()
        store = Store(database, clock)
        await store.open()
        await happen(store, "waiting", vm="new")
        housekeeping = Housekeeping(store, KEEP, clock)
    with structlog.testing.capture_logs() as logs:
        assert await housekeeping.prune() == {}
        clock.now = 2 * DAY_S
        assert [await housekeeping.prune() for _ in range(LOOKS)] == [{}] * LOOKS
    assert [log["event"] for log in logs] == ["nothing of the store is deleted for now"]
    assert await store.plan("request-one") is not None, "sent again it is the same operation"
    clock.now = 401 * DAY_S
    looks = [await housekeeping.prune() for _ in range(LOOKS + 1)]
    assert looks[:LOOKS] == [{}] * LOOKS
    assert looks[LOOKS]["vms"] == 2, "it stands by that"
    await store.close()


async def test_the_newest_change_of_a_host_and_of_a_living_machine_stays(database: Database) -> None:
    clock = Clock()
    store = Store(database, clock)
    await store.open()
    for name, host in (("living", "h"), ("dead", "h"), ("living-elsewhere", "other")):
        await removal(store, name, host, VMPhase.ENDED if name == "dead" else None)

    def change(sequence: int, machine: str, at: float) -> CoreChange:
        return CoreChange(
            sequence=sequence, machine=machine, host="h", at=at, cores_before=2, cores_after=1, cause="test"
        )

    await store.add_core_changes("h", [change(n, "living", float(n)) for n in range(1, 6)])
    await store.add_core_changes("h", [change(n, "dead", float(n)) for n in range(6, 11)])
    clock.now = 100 * DAY_S
    await store.add_core_changes("other", [change(1, "living-elsewhere", clock.now)])
    assert (await Housekeeping(store, KEEP, clock).prune())["core changes"] == 8
    assert rows_of(database, "SELECT host, sequence FROM core_changes ORDER BY 1, 2") == [
        ("h", 5),
        ("h", 10),
        ("other", 1),
    ]
    assert (await store.add_core_changes("h", []))[0] == 10
    await store.close()


async def test_where_managers_were_reached_that_have_led_is_known_for_ever(database: Database) -> None:
    clock = Clock()
    for url in ("http://a", None, "http://b", None, "http://a", "http://b"):
        store = Store(database, clock)
        await store.open(url)
        await store.close()
        clock.now += DAY_S
    clock.now = 100 * DAY_S
    store = Store(database, clock)
    await store.open("http://c")
    housekeeping = Housekeeping(store, KEEP, clock)
    assert [await housekeeping.prune() for _ in range(LOOKS + 1)] == [*LOOKS * ({},), {"terms": 3}]
    assert names(database, "terms", "epoch") == [4, 5, 6, 7]
    assert await store.leaders() == {"http://a", "http://b", "http://c"}
    await store.close()


# Terms are few.
@pytest.mark.parametrize("kind", [kind for kind in statements(KEEP, 0.0) if kind != "terms"])
async def test_what_is_deleted_is_found_by_an_index(tmp_path: Path, kind: str) -> None:
    store = Store(tmp_path / "db", lambda: 0.0)
    await store.open()
    statement = statements(KEEP, 100 * DAY_S)[kind]
    compiled = statement.compile(store._engine.sync_engine, compile_kwargs={"literal_binds": True})
    await store.close()
    told = [row[3] for row in rows_of(tmp_path / "db", f"EXPLAIN QUERY PLAN {compiled}")]
    assert told[0].startswith("SEARCH"), told


async def test_of_more_events_than_wanted_the_oldest_go(database: Database) -> None:
    store = Store(database, lambda: 0.0)
    await store.open()
    for number in range(20):
        await happen(store, "waiting", vm=f"vm-{number:02}")
    few = Retention(most_events=5, batch=4, pause_s=0.0)
    assert await Housekeeping(store, few, lambda: 0.0).prune() == {"events": 15}
    assert names(database, "events", "vm") == [f"vm-{number}" for number in range(15, 20)]
    await store.close()


@pytest.mark.usefixtures("each_store")
async def test_a_leader_prunes_by_itself_while_it_works(tmp_path: Path) -> None:
    keep = Retention(most_events=3, every_s=0.05, pause_s=0.0)
    agent = FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)
    async with cluster_of(tmp_path, agent, retention=keep) as cluster:
        for number in range(6):
            await cluster.create(vm(f"vm-{number}", cpu_cores=0.6, memory_mib=301.0))

        async def pruned() -> bool:
            return len((await cluster.get("/v1/events"))["events"]) <= 3

        await until(pruned)
        assert len((await cluster.get("/v1/vms"))["vms"]) == 6


@pytest.mark.looptime
async def test_a_store_that_cannot_be_pruned_is_tried_again(database: Database) -> None:
    store = Store(database, lambda: 0.0)
    housekeeping = Housekeeping(store, KEEP, lambda: 0.0)
    await store.close()
    with structlog.testing.capture_logs() as logs:
        housekeeping.start()
        await asyncio.sleep(3.5 * KEEP.every_s)
        assert await housekeeping.stop()
    assert [log["event"] for log in logs] == ["the store was not pruned"] * 4
    assert not await housekeeping.stop()

"""The rebalancer at work, in time of its own: who is moved when, and what it knows after a restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster_manager.defaults import RebalancingRules
from cluster_manager.errors import RequestError
from cluster_manager.settings import Settings
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostTemplate
from ebbtide.messages.operations import Operation, OperationState
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.lifecycle import ask, consistent, seen
from tests.manager.two_agents import two_hosts
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")

SHRUNK = Vector(cpu_cores=1.5, memory_mib=650.0)
#: Looks come when a test says so.
RULES = RebalancingRules(every_s=600.0)
COPIES = replace(RULES, copy_disks=True)
SHARED = (HostTemplate(name="lab", shared_disk=True),)


class Time:
    """Seconds since the epoch, as the rebalancer is told."""

    def __init__(self, cluster: Cluster) -> None:
        self.now = 1e6
        self.cluster = cluster

    async def look(self, after_s: float = 0.0, rules: RebalancingRules = RULES) -> list[Operation]:
        """The next look, and the operations that it begins."""
        assert self.cluster.manager is not None
        self.now += after_s
        rebalancing = self.cluster.manager.rebalancing
        rebalancing._clock = lambda: self.now
        await self.cluster.ready()
        return await rebalancing.look(rules)

    async def looks(self, for_s: float, every_s: float = 600.0, rules: RebalancingRules = RULES) -> list[Operation]:
        """All looks of a time."""
        begun = []
        for _ in range(round(for_s / every_s)):
            begun += await self.look(every_s, rules)
        return begun

    async def restart(self) -> None:
        assert self.cluster.manager is not None
        await self.cluster.kill_manager()
        await self.cluster.start_manager()
        await self.cluster.ready()


async def fill(cluster: Cluster, agent: FakeAgent, *names: str) -> None:
    """A host that has just what its deflated VMs hold."""
    for name in names:
        assert (await cluster.create(vm(name), policy="first-fit")).host == agent.id
    shrunk = {name: status.model_copy(update={"current": SHRUNK}) for name, status in agent.vms.items()}
    agent.vms, agent.capacity = shrunk, ResourceVector(1.5 * len(names), 750.0 * len(names))


@contextlib.asynccontextmanager
async def rebalanced(path: Path, rules: RebalancingRules | None = RULES) -> AsyncIterator[tuple[Cluster, Time]]:
    """host-a is full of two deflated VMs whose disks are shared; host-b is empty."""
    a, b = (FakeAgent(f"host-{name}", cpu_cores=6.0, memory_mib=2400.0) for name in "ab")
    a.templates = b.templates = SHARED
    async with cluster_of(path, a, b, silent_after_s=60.0, rebalancing=rules) as cluster:
        await fill(cluster, a, "low-1", "low-2")
        a.peers, b.peers = {"host-b": b}, {"host-a": a}
        await cluster.ready()
        yield cluster, Time(cluster)


async def proposed(cluster: Cluster, query: str = "") -> Any:
    return await cluster.get(f"/v1/rebalancing{query}")


async def test_a_vm_goes_where_there_is_room_once_its_host_has_held_deflated_ones_for_long(tmp_path: Path) -> None:
    async with rebalanced(tmp_path) as (cluster, time):
        assert await time.look() == []
        assert await time.looks(1200) == []
        found = await proposed(cluster)
        assert (found["moves"], found["lasted_s"], found["watched_s"]) == ([], None, 1200.0)
        assert "1 of them with deflated VMs, for 1200 s at most, as seen in the 1200 s in which" in found["sentence"]
        (begun,) = await time.look(600)
        assert (begun.kind, begun.vm) == ("live-migrate", "low-1")
        assert begun.request_id.startswith("rebalance-")
        ended = await cluster.ended(begun.request_id)
        why = (
            "2 VMs of host-a lack 3 cores, 700 MiB together, and host-b has 6 cores, 2400 MiB beyond what its own lack"
        )
        assert ended.state is OperationState.DONE
        assert ended.sentence == f"moved low-1 from host-a to host-b: {why}, for 1800 s"
        assert ended.progress[0] == f"rebalancing: {why}, for 1800 s"
        (event,) = await cluster.events("migrated")
        assert (event["vm"], event["sentence"]) == ("low-1", ended.sentence)
        assert (await seen(cluster, "low-1"))["host"] == "host-b"
        await consistent(cluster)


async def test_the_dry_run_shows_for_how_long_or_takes_it_as_given(tmp_path: Path) -> None:
    async with rebalanced(tmp_path, replace(RULES, every_s=3600.0)) as (cluster, time):
        await time.look(rules=replace(RULES, most_moves=0))
        await time.look(3000, replace(RULES, every_s=3600.0, most_moves=0))
        (move,) = (await proposed(cluster))["moves"]
        assert (move["lasted_s"], move["core_hours"]) == (3000.0, 2.5)
        taken = await proposed(cluster, "?lasted_s=7200")
        assert (taken["lasted_s"], taken["watched_s"]) == (7200.0, None)
        assert (taken["moves"][0]["lasted_s"], taken["moves"][0]["core_hours"]) == (7200.0, 6.0)


async def test_without_the_option_nothing_is_looked_at_and_nobody_moves(tmp_path: Path) -> None:
    async with rebalanced(tmp_path, None) as (cluster, _):
        assert cluster.manager is not None
        assert "rebalancing" not in {task.get_name() for task in asyncio.all_tasks()}
        assert (await proposed(cluster))["lasted_s"] == 1800.0
    assert Settings(database=tmp_path / "m", token="t", hosts_key="k").rebalancing is None


async def test_with_the_option_it_looks_by_itself(tmp_path: Path) -> None:
    rules = replace(RULES, every_s=0.05, pace=replace(RULES.pace, hold_s=0.0, least_worth=0.0))
    async with rebalanced(tmp_path, rules) as (cluster, _):

        async def has_moved() -> bool:
            await cluster.ready()
            return bool(await cluster.events("migrated"))

        await until(has_moved)


async def test_who_was_moved_rests_and_nobody_goes_to_and_fro(tmp_path: Path) -> None:
    """Whatever becomes of its new host: low-1 stays there for six hours."""
    async with rebalanced(tmp_path) as (cluster, time):
        a, b = cluster.agents
        (begun,) = [*await time.look(), *await time.looks(1800)]
        await cluster.ended(begun.request_id)
        a.vms = {"low-2": a.vms["low-2"].model_copy(update={"current": a.vms["low-2"].nominal})}
        a.capacity = ResourceVector(9.0, 4000.0)
        b.vms["low-1"] = b.vms["low-1"].model_copy(update={"current": SHRUNK})
        b.capacity = ResourceVector(1.5, 750.0)
        assert await time.looks(19_800) == []
        (back,) = await time.looks(2400)
        assert (back.vm, (await cluster.ended(back.request_id)).host) == ("low-1", "host-a")


async def test_a_move_that_does_not_converge_is_called_off_and_not_tried_again_soon(tmp_path: Path) -> None:
    async with rebalanced(tmp_path) as (cluster, time):
        a, b = cluster.agents
        a.sticks = "it had not converged after 600 s"
        await time.look()
        (begun,) = await time.looks(1800)
        ended = await cluster.ended(begun.request_id)
        assert (ended.state, "it had not converged" in ended.sentence) == (OperationState.FAILED, True)
        assert "low-1" not in b.vms
        row = await seen(cluster, "low-1")
        assert (row["state"], row["host"]) == ("running", "host-a")
        a.sticks = ""
        (other,) = await time.looks(600)
        assert other.vm == "low-2", "low-1 rests"
        await cluster.ended(other.request_id)
        await consistent(cluster)


async def test_a_disk_that_is_not_shared_is_copied_by_choice_only(tmp_path: Path) -> None:
    async with rebalanced(tmp_path) as (cluster, time):
        cluster.agents[0].templates = cluster.agents[1].templates = (HostTemplate(name="lab"),)
        await time.look()
        assert await time.looks(3600) == []
        left = [row["sentence"] for row in (await proposed(cluster))["left_out"]]
        assert "low-1 stays on host-a: its disk is on host-a alone, and none is copied (--rebalance-copy-disks)" in left
        (begun,) = await time.looks(600, rules=COPIES)
        assert (await cluster.ended(begun.request_id)).state is OperationState.DONE


async def test_few_move_at_a_time_and_of_one_host_one(tmp_path: Path) -> None:
    """Also while a move that has begun still reads where its VM is, and has chosen nothing."""
    agents = [FakeAgent(f"host-{name}", cpu_cores=9.0, memory_mib=4000.0) for name in "abc"]
    async with cluster_of(tmp_path, *agents, silent_after_s=60.0, rebalancing=COPIES) as cluster:
        for number, agent in enumerate(agents[:2]):
            await fill(cluster, agent, *(f"low-{number}{n}" for n in range(3)))
        agents[2].capacity = ResourceVector(60.0, 40_000.0)
        for agent in agents:
            agent.peers = {other.id: other for other in agents if other is not agent}
            agent.trouble.pend = ("depart",)
        time, reading = Time(cluster), asyncio.Event()
        await time.look(rules=COPIES)
        for agent in agents[:2]:
            agent.trouble.read_after = reading
        begun = await time.looks(1800, rules=replace(COPIES, most_moves=5))
        assert len(begun) == 1, "both would go to host-c"
        assert await time.looks(1200, rules=replace(COPIES, most_moves=5)) == [], "host-c will have one"
        reading.set()
        assert await time.looks(1200, rules=replace(COPIES, most_moves=5)) == [], "host-c has one under way"
        assert await time.look(rules=replace(COPIES, most_moves=1)) == []


async def test_a_manager_that_starts_soon_goes_on_with_what_was_seen(tmp_path: Path) -> None:
    async with rebalanced(tmp_path) as (cluster, time):
        await time.look()
        await time.looks(1200)
        await time.restart()
        (begun,) = await time.look(600)
        await cluster.ended(begun.request_id)
        assert begun.vm == "low-1"


async def test_a_manager_that_was_long_gone_begins_anew(tmp_path: Path) -> None:
    async with rebalanced(tmp_path) as (cluster, time):
        await time.look()
        await time.looks(1200)
        await time.restart()
        assert await time.look(1801) == []
        assert (await proposed(cluster))["watched_s"] == 0.0
        assert len(await time.looks(1800)) == 1


async def test_the_longest_name_leaves_room_for_the_ids_of_all_that_follows(tmp_path: Path) -> None:
    name = "l" * 40
    async with rebalanced(tmp_path) as (cluster, time):
        a, _ = cluster.agents
        for other in ("low-1", "low-2"):
            await cluster.delete(other)
        a.capacity = ResourceVector(6.0, 2400.0)
        await cluster.ready()
        await fill(cluster, a, name, "low-3")
        await time.look()
        (begun,) = await time.looks(1800)
        assert begun.vm == name
        assert len(begun.request_id) <= 80 - len(".rest.left.1234")
        assert (await cluster.ended(begun.request_id)).state is OperationState.DONE


async def test_what_was_seen_by_a_clock_that_was_set_back_or_is_damaged_begins_anew(tmp_path: Path) -> None:
    async with rebalanced(tmp_path) as (cluster, time):
        await time.look()
        await time.looks(1200)
        assert await time.look(-3600) == []
        assert await time.looks(1200) == []
        assert cluster.manager is not None
        await cluster.manager.store.save_knowledge("rebalancing", '{"at": "yesterday"}')
        await time.restart()
        assert await time.looks(1800) == []
        assert len(await time.look(600)) == 1


async def test_a_manager_killed_while_one_moves_goes_on_with_that_move_and_begins_no_other(tmp_path: Path) -> None:
    async with rebalanced(tmp_path) as (cluster, time):
        a, _ = cluster.agents
        a.trouble.pend = ("depart",)
        await time.look()
        (begun,) = await time.looks(1800)
        async with asyncio.timeout(20):
            await a.polled.wait()
        await time.restart()
        assert await time.look(600) == [], "it is under way"
        a.end_pending()
        assert (await cluster.ended(begun.request_id)).state is OperationState.DONE
        assert await time.looks(1800) == []
        await consistent(cluster)


async def test_it_stands_back_where_a_host_is_paused_a_vm_waits_or_another_plan_is_at_work(tmp_path: Path) -> None:
    async with rebalanced(tmp_path) as (cluster, time):
        a, b = cluster.agents
        await time.look()
        await time.looks(1200)
        for agent, mode in ((a, HostMode.PAUSED), (b, HostMode.DRAINING), (b, HostMode.OFF)):
            agent.mode = mode
            assert await time.look(600) == []
            agent.mode = HostMode.ACTIVE
        await cluster.ready()
        b.trouble.pend = ("create",)
        request = {"request_id": "slow", "vm": vm("high-1", "fixed", 0.5, 200.0), "deadline_s": 30.0}
        assert (await cluster.call("POST", "/v1/vms", json=request))[0] == 202
        async with asyncio.timeout(20):
            await b.polled.wait()
        assert await time.look(600) == [], "a placement has host-b"
        left = [row["sentence"] for row in (await proposed(cluster))["left_out"]]
        assert "a plan is at work on host-b" in left
        b.end_pending()
        await cluster.ended("slow")
        # The host's deflation has lasted all the while.
        (begun,) = await time.look(600)
        assert "for 4200 s" in (await cluster.ended(begun.request_id)).sentence


async def test_room_that_a_preempted_vm_waits_for_is_not_given_away(tmp_path: Path) -> None:
    async with rebalanced(tmp_path) as (cluster, time):
        assert cluster.manager is not None
        waiting = cluster.manager.operations.waiting
        row = (await cluster.manager.store.vms("low-2"))[0]
        await time.look()
        await time.looks(1200)
        waiting._by_host = {"host-b": [row]}
        assert await time.look(600) == []
        left = [entry["sentence"] for entry in (await proposed(cluster))["left_out"]]
        assert left == ["1 preempted VM waits for room on host-b"]
        waiting._by_host = {}
        assert len(await time.look(600)) == 1


async def test_a_vm_that_its_owner_has_stopped_meanwhile_is_left_alone(tmp_path: Path) -> None:
    async with rebalanced(tmp_path) as (cluster, time):
        assert cluster.manager is not None
        await time.look()
        await time.looks(1200)
        found = await cluster.manager.rebalancing._look(RULES, time.now + 600)
        assert (await ask(cluster, "low-1", "stop")).state is OperationState.DONE
        with pytest.raises(RequestError, match="low-1 is stopped"):
            await cluster.manager.lifecycle.rebalance(found.moves[0], RULES)


async def test_a_vm_that_two_real_agents_move_has_its_size_again_where_it_came_to(tmp_path: Path) -> None:
    """low-1 is shrunk for high-1, host-b is empty."""
    async with two_hosts(tmp_path) as two:
        cluster = two.cluster
        two.world.move_ends.set()
        await cluster.create(vm("low-1"), policy="first-fit")
        high = await cluster.create(vm("high-1", "fixed", 4.5, 500.0), policy="first-fit")
        assert (high.state, high.host) == (OperationState.DONE, "host-a")

        async def has(cpu_cores: float) -> bool:
            row = await cluster.get("/v1/vms/low-1")
            return bool(row["current"]["cpu_cores"] == cpu_cores)

        async def proposes() -> bool:
            return bool((await proposed(cluster))["moves"])

        await until(lambda: has(1.5))
        await until(proposes)
        time = Time(cluster)
        assert await time.look(rules=COPIES) == []
        (begun,) = await time.looks(1800, rules=COPIES)
        moved = await cluster.ended(begun.request_id)
        assert (moved.state, moved.host) == (OperationState.DONE, "host-b")
        assert two.running("low-1") == ["host-b"]
        await until(lambda: has(3.0))

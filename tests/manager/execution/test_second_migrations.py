"""What clears up after a migration that failed leaves the VM alone that another one is bringing to the same host."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_manager.execution.clearing import has_begun
from cluster_manager.plans.live_migrations import start_live_migration
from cluster_manager.plans.migrations import start_migration
from cluster_manager.plans.plans import Arrive
from cluster_manager.plans.removals import start_removal
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.requests import MigrateRequest
from ebbtide.messages.vms import VMSpec
from tests.manager.cluster import Cluster, cluster_of, vm
from tests.manager.fake_agent import FakeAgent
from tests.manager.lifecycle import ask, consistent, seen, send
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("each_store")

LIVE = {"live": True, "copy_storage": True}


async def first_one_fails(cluster: Cluster) -> None:
    """low-1 does not leave host-a, and host-b does not give up what it has kept for it."""
    first, second = cluster.agents
    first.peers, second.peers = {"host-b": second}, {"host-a": first}
    await cluster.ready()
    await cluster.create(vm("low-1"), policy="first-fit")
    first.sticks, second.trouble.fails = "it had not converged", {"delete": "its hypervisor is busy"}
    failed = await ask(cluster, "low-1", "migrate", **LIVE, host="host-b", request_id="one")
    assert failed.state is OperationState.FAILED
    first.sticks = ""
    # Its agent has forgotten it meanwhile.
    del second.vms["low-1"]


async def clears(cluster: Cluster) -> list[str]:
    """The progress of the plans that clear up."""
    assert cluster.manager is not None
    plans = await cluster.manager.store.unfinished_plans()
    return [said for plan in plans if plan.state.internal for said in plan.state.progress]


def test_what_only_waits_for_the_host_is_not_waited_for() -> None:
    """It needs the host cleared first."""
    spec = VMSpec(name="low-1", nominal=Vector(cpu_cores=1.0, memory_mib=800.0))
    request = MigrateRequest(request_id="two", host="host-b")
    cold = start_migration("two", request, spec, "host-a", running=True, policy=PlacementPolicy.BEST_FIT)
    live = start_live_migration("two", request, spec, "host-a", policy=PlacementPolicy.BEST_FIT)
    arrive = Arrive(host="host-b", step=1, spec=spec, size=spec.nominal, boot_memory_mib=400.0, generation=1, uuid="u")
    arriving = live.having(stage="room", instruction=arrive)
    begun = {
        "cold waits": cold,
        "cold has started it": cold.having(starts=1),
        "live waits": live,
        "live arrives": arriving,
        "live sends": live.having(stage="moving"),
        "it clears up": live.having(stage="left"),
        "it deletes": start_removal("two", "two", "low-1", "host-b"),
    }
    assert {name for name, plan in begun.items() if has_begun(plan)} == {
        "cold has started it",
        "live arrives",
        "live sends",
    }


@pytest.mark.parametrize("how", ["arrives", "fails", "leaves-something"])
async def test_a_second_migration_to_the_same_host_keeps_its_vm(tmp_path: Path, how: str) -> None:
    """Where it fails and leaves something too, those that clear up do not wait for one another."""
    ends = how == "arrives"
    agents = (FakeAgent(name, cpu_cores=6.0, memory_mib=2400.0) for name in ("host-a", "host-b"))
    async with cluster_of(tmp_path, *agents) as cluster:
        first, second = cluster.agents
        await first_one_fails(cluster)
        first.trouble.pend = ("depart",)
        assert (await send(cluster, "low-1", "migrate", **LIVE, host="host-b", request_id="two"))[0] == 202

        async def leaves() -> bool:
            return first.arrived[-1] == "depart" and "low-1" in second.vms

        async def waits() -> bool:
            assert ("delete", "low-1") not in second.done, "it was removed on its way"
            return any("live-migrate two is bringing low-1 to host-b" in said for said in await clears(cluster))

        async def cleared() -> bool:
            return not await clears(cluster)

        await until(leaves)
        if how != "leaves-something":
            second.trouble.fails = {}
        await until(waits)
        first.sticks = "" if ends else "it had not converged either"
        first.end_pending()
        moved = await cluster.ended("two")
        assert moved.state is (OperationState.DONE if ends else OperationState.FAILED), moved.sentence
        second.trouble.fails = {}
        await until(cleared)
        where = "host-b" if ends else "host-a"
        row = await seen(cluster, "low-1")
        assert (row["state"], row["host"]) == ("running", where)
        assert [agent.id for agent in cluster.agents if "low-1" in agent.vms] == [where]
        await consistent(cluster)

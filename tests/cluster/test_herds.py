"""Eight fixed VMs at once, on real agents in faked time: docs/reference/placement.md gives figures of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import Effect, Note, Plan, Reclaim, Reinflate
from ebbtide.deflation.resources import ResourceVector
from tests.chaos.workload import Client, Request
from tests.cluster.cluster import URL, FakedCluster
from tests.cluster.wire import Connector
from tests.manager.cluster import TOKEN

SIZE = ResourceVector(16.0, 16_000.0)


def body(name: str, cores: float, mib: float, share: float | None = None) -> dict[str, Any]:
    """:param share: the minimum of a deflatable VM; None: it is fixed."""
    nominal = {"cpu_cores": cores, "memory_mib": mib}
    if share is None:
        return {"name": name, "priority": "fixed", "nominal": nominal}
    minimum = {key: value * share for key, value in nominal.items()}
    return {"name": name, "priority": "deflatable", "nominal": nominal, "minimum": minimum}


LOW = [body(f"low-{number}", 4.0, 3500.0, 0.25) for number in range(4)]


def herd(directory: Path, before: list[dict[str, Any]], at_once: list[dict[str, Any]]) -> tuple[Counter[str], float]:
    """What happened, by kind, and when the last arrival was placed or refused, in seconds."""
    cluster = FakedCluster(directory, {"host-a": SIZE}, 1)
    happened: Counter[str] = Counter()
    left: dict[str, float] = {}

    def watch(state: Plan, effects: Iterable[Effect]) -> None:
        happened["reclaims"] += isinstance(state.instruction, Reclaim)
        happened["reinflations"] += isinstance(state.instruction, Reinflate)
        happened.update(effect.kind for effect in effects if isinstance(effect, Note))
        if isinstance(state, PlacementPlan) and state.finished:
            left[state.vm] = cluster.loop.time()

    async def client() -> Client:
        session = aiohttp.ClientSession(connector=Connector(cluster.wire), headers={"Authorization": f"Bearer {TOKEN}"})
        return Client(Random(1), URL, session)

    cluster.watchers.append(watch)
    with cluster.patched():
        try:
            cluster.start()
            asking = cluster.run(client())
            cluster.pass_time(5.0)
            for bodies in (before, at_once):
                happened.clear()
                began = cluster.loop.time()
                for vm in bodies:
                    asked = {"request_id": vm["name"], "vm": vm, "deadline_s": 60.0}
                    asking.priority[vm["name"]] = vm["priority"]
                    asking.requests.append(Request(vm["name"], "create", vm["name"], "POST", "/v1/vms", asked))
                    cluster.run(asking.send(asking.requests[-1]))
                # Guests boot, and what is not needed grows again.
                cluster.pass_time(120.0)
            cluster.run(asking.session.close())
        finally:
            cluster.close()
    print(dict(happened), f"{max(left.values()) - began:.1f} s")
    assert len(left) == len(before) + len(at_once)
    return happened, max(left.values()) - began


def test_eight_that_deflation_can_hold_are_two_deflations(tmp_path: Path) -> None:
    happened, _ = herd(tmp_path, LOW, [body(f"high-{number}", 1.0, 800.0) for number in range(8)])
    assert (happened["placed"], happened["reclaims"], happened["reinflations"]) == (8, 2, 0)
    assert happened["deflated"] == 8, "each VM once a deflation"


def test_where_two_are_too_many_as_few_are_preempted_as_for_each_by_itself(tmp_path: Path) -> None:
    happened, _ = herd(tmp_path, LOW, [body(f"high-{number}", 2.0, 1400.0) for number in range(8)])
    assert (happened["placed"], happened["preempted"]) == (8, 4), "two of 4 cores for each: all are at their minimum"
    assert happened["reclaims"] <= 3


def test_those_that_arrive_together_with_low_priority_vms_are_placed_as_soon_as_these_have_booted(
    tmp_path: Path,
) -> None:
    happened, seconds = herd(tmp_path, [], [*LOW, *(body(f"high-{number}", 1.0, 800.0) for number in range(8))])
    assert (happened["placed"], happened["preempted"], happened["refused"]) == (12, 0, 0)
    assert seconds < 60.0

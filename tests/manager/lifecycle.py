"""What tests of a VM's lifecycle share: asking for it, looking at it, and killing the manager at its records."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from cluster_manager.plans.plans import Effect, Plan
from ebbtide.deflation.resources import ZERO
from ebbtide.messages.operations import Operation, OperationState
from tests.manager.cluster import Cluster
from tests.manager.fake_agent import FakeAgent
from tests.manager.fake_lifecycle import runs

#: More than a plan that gets on has records. A plan that goes back to an earlier record at each start ends it, too.
MOST_KILLS = 12

Save = Callable[[Plan, Iterable[Effect]], Awaitable[float]]


async def ask(cluster: Cluster, name: str, verb: str, **body: Any) -> Operation:
    """One request, to its end."""
    request_id = body.pop("request_id", f"{verb}-{name}")
    status, answer = await send(cluster, name, verb, request_id=request_id, **body)
    assert status == 202, answer
    return await cluster.ended(request_id)


async def send(cluster: Cluster, name: str, verb: str, **body: Any) -> tuple[int, Any]:
    body = {"request_id": f"{verb}-{name}", **body}
    if verb == "resize":
        return await cluster.call("PATCH", f"/v1/vms/{name}", json=body)
    return await cluster.call("POST", f"/v1/vms/{name}/{verb}", json=body)


async def lose_it_on_the_way(cluster: Cluster) -> None:
    """The second host starts low-1, and is not heard of again."""
    _, second = cluster.agents
    second.trouble.hangs_at = len(second.arrived) + 1
    assert (await send(cluster, "low-1", "migrate", lose_disk=True, deadline_s=0.5))[0] == 202
    async with asyncio.timeout(10):
        await second.hanging.wait()
    await second.die()
    failed = await cluster.ended("migrate-low-1")
    assert failed.state is OperationState.FAILED


async def seen(cluster: Cluster, name: str) -> Any:
    """A VM as clients see it, after a report of each host."""
    await cluster.ready()
    return await cluster.get(f"/v1/vms/{name}")


async def consistent(cluster: Cluster) -> None:
    """Hosts and manager tell the same story, no host is overfull, no VM is on two hosts."""
    await cluster.ready()
    rows = (await cluster.get("/v1/vms"))["vms"]
    managed = {(row["name"], row["host"], row["state"]) for row in rows if row["host"]}
    there = {
        (name, agent.id, "running" if runs(vm) else "stopped")
        for agent in cluster.agents
        for name, vm in agent.vms.items()
    }
    assert managed == there
    assert len({name for name, _, _ in there}) == len(there), "a VM is on two hosts"
    for agent in cluster.agents:
        charged = sum((vm.allocation().charge for vm in agent.vms.values()), ZERO)
        assert charged.fits_in(agent.capacity), f"{agent.id} is overfull: {charged}"


def watch_for_two(agents: Iterable[FakeAgent], name: str) -> list[str]:
    """From now on, whatever makes a VM run on two hosts at once is written down."""
    found: list[str] = []
    agents = list(agents)
    for agent in agents:
        change = agent.add_change

        def add(machine: str, before: float, after: float, change: Any = change, **more: Any) -> None:
            running = [a.id for a in agents if machine in a.vms and runs(a.vms[machine])]
            if machine == name and len(running) > 1:
                found.append(f"{name} runs on {running}")
            change(machine, before, after, **more)

        agent.add_change = add  # type: ignore[method-assign, assignment]
    return found


def kill_at_next_record(cluster: Cluster, stored: bool) -> asyncio.Event:
    """Stop the plan dead at its next record, before or after it is stored; the event says when."""
    assert cluster.manager is not None
    store, reached = cluster.manager.store, asyncio.Event()
    save: Save = store.save_step

    async def stop(state: Plan, effects: Iterable[Effect]) -> float:
        if stored:
            await save(state, effects)
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError("never reached")

    store.save_step = stop  # type: ignore[method-assign]
    return reached


async def one_record(cluster: Cluster) -> None:
    """Let exactly one record pass, and stop the plan dead."""
    assert cluster.manager is not None
    store, passed = cluster.manager.store, asyncio.Event()
    save: Save = store.save_step

    async def once(state: Plan, effects: Iterable[Effect]) -> float:
        if not passed.is_set():
            await save(state, effects)
            passed.set()
        await asyncio.Event().wait()
        raise AssertionError("never reached")

    store.save_step = once  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        await passed.wait()


async def kill_at_every_record(cluster: Cluster, request_id: str, stored: bool) -> int:
    """Kill the manager at its first record, the next one at its second, and so on until the operation has ended.

    :param stored: whether each record is stored before the manager dies.
    :returns: how often it was killed.
    """
    kills = 0
    while kills < MOST_KILLS:
        killed = kill_at_next_record(cluster, stored)
        watcher = asyncio.create_task(cluster.ended(request_id), name="watch the operation")
        killer = asyncio.create_task(killed.wait(), name="watch the records")
        await asyncio.wait({watcher, killer}, return_when=asyncio.FIRST_COMPLETED)
        if not killer.done():
            killer.cancel()
            break
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await cluster.kill_manager()
        kills += 1
        gc.collect()  # a killed manager's arrays, 30 MiB, weigh nothing for the collector
        if not stored:
            # Otherwise the same record would be the next for ever: this one may pass.
            await cluster.start_manager()
            await one_record(cluster)
            await cluster.kill_manager()
        await cluster.start_manager()
    return kills

"""What must be true when everything has come to rest: store, agents and answers tell the same story."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ebbtide.deflation.allocations import Priority, deflatable_capacity
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.proportional import share_room
from ebbtide.deflation.sharing.undo import SMALLEST_GROWTH
from tests.chaos.agent import ChaosAgent, Watch
from tests.chaos.histories import disagreements
from tests.chaos.workload import Client
from tests.manager.fake_lifecycle import runs
from tests.manager.plan_events import gives


class Violated(AssertionError):
    """A rule was broken. No busy machine explains that, so such a test is not tried again (tests/conftest.py).

    What has only not come about within a time limit is no such thing: a plain assertion.
    """


def hold(when: str, *found: str) -> None:
    """:raises Violated: something is wrong, a sentence each."""
    if found:
        raise Violated(f"{when}: {list(found)}")


def apart(managed: Collection[tuple[str, str]], present: Collection[tuple[str, str]]) -> list[str]:
    """Where the manager and the hosts tell another story of which VM, by name, is on which host."""
    gone, unknown = set(managed) - set(present), set(present) - set(managed)
    return [f"only in the store: {gone}; only on hosts: {unknown}"] if gone or unknown else []


#: Phases of VMs that nothing is done with.
AT_REST = ("running", "stopped", "preempted")


def rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    """Read past the manager."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10)) as connection:
        return connection.execute(query).fetchall()


def unsettled(database: Path) -> list[tuple[Any, ...]]:
    """What the manager still has to do."""
    return rows(
        database,
        "SELECT 'plan', id, state FROM plans WHERE finished = 0 "
        "UNION SELECT 'removal', name, host FROM vms WHERE owes_removal = 1 AND phase <> 'ended' "
        "UNION SELECT 'reinflation', id, '' FROM hosts WHERE owes_reinflation = 1",
    )


def histories(database: Path, found: Sequence[str]) -> list[str]:
    """What the manager wrote down of each VM that is named in what is wrong."""
    events = rows(database, "SELECT at, plan, host, kind, sentence, vm FROM events ORDER BY id")
    names = {name for sentence in found for name in re.findall(r"vm-\d+", sentence)}
    return ["  ".join(str(field) for field in event) for event in events if event[-1] in names]


async def settled(database: Path, limit_s: float) -> list[tuple[Any, ...]]:
    """Wait until nothing is to be done any more; what still is after the limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while await asyncio.to_thread(unsettled, database):
                await asyncio.sleep(0.1)
    return await asyncio.to_thread(unsettled, database)


def waiting_beside_room(database: Path, agents: Sequence[ChaosAgent]) -> list[str]:
    """Preempted VMs that could start in what their host has free or could deflate."""
    waiting = rows(database, "SELECT name, host FROM vms WHERE phase = 'preempted'")
    found = []
    for agent in agents:
        others = [vm for vm in agent.vms.values() if runs(vm)]
        room = agent.free() + deflatable_capacity(vm.allocation() for vm in others if gives(vm))
        gone = [name for name, host in waiting if host == agent.id and name not in agent.vms]
        found += [f"{name} waits on {agent.id}, which does not have it any more" for name in gone]
        for vm in (agent.vms[name] for name, host in waiting if host == agent.id and name in agent.vms):
            boots = ResourceVector(memory_mib=min(vm.boot_memory_mib, vm.nominal.memory_mib))
            least = vm.minimum.vector().larger(boots) + ResourceVector(memory_mib=agent.overhead_mib)
            if least.fits_in(room):
                found.append(f"{vm.name} waits on {agent.id} for {least}, which has {room}")
    return found


def unfinished(database: Path, agents: Sequence[ChaosAgent]) -> list[str]:
    """What is under way or could go on, and so may be a matter of time: returns and growth are patient."""
    growing = [(agent, names) for agent in agents if (names := deflated_beside_room(agent))]
    return [
        *(f"not settled: {row}" for row in unsettled(database)),
        *waiting_beside_room(database, agents),
        *(f"on {agent.id}, which has {agent.free()} free, {names} are still deflated" for agent, names in growing),
    ]


async def at_rest(database: Path, agents: Sequence[ChaosAgent], limit_s: float) -> list[str]:
    """Wait until nothing is unfinished any more; what still is after the limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while await asyncio.to_thread(unfinished, database, agents):
                await asyncio.sleep(0.1)
    return await asyncio.to_thread(unfinished, database, agents)


async def violations(database: Path, client: Client, agents: Sequence[ChaosAgent], watch: Watch) -> list[str]:
    """Everything that is wrong, a sentence each."""
    found = [*watch.violations, *client.violations]
    stored = await asyncio.to_thread(
        rows, database, "SELECT name, host, phase, sentence FROM vms WHERE phase <> 'ended' ORDER BY name"
    )
    managed = {(name, host) for name, host, phase, _ in stored if phase in AT_REST}
    present = {(name, agent.id) for agent in agents for name in agent.vms}
    found += apart(managed, present)
    for name, host, phase, why in stored:
        if phase not in AT_REST and (phase != "failed" or host):
            found.append(f"{name} is {phase} on {host}: {why}")
    events = await asyncio.to_thread(
        rows, database, "SELECT vm, sentence FROM events WHERE kind IN ('preempting', 'preempted')"
    )
    for name, reason in watch.preempted.items():
        if not any(vm == name and f"reason {reason}" in sentence for vm, sentence in events):
            found.append(f"{name} was preempted (reason {reason}) without a record")
    preempted = {vm for vm, _ in events}
    found += _lost(client, {name for name, _ in present}, preempted)
    found += disagreements(client, await client.vms(), agents, preempted)
    doubled = await asyncio.to_thread(
        rows, database, "SELECT request_id, count(*) FROM plans GROUP BY request_id HAVING count(*) > 1"
    )
    found += [f"{request_id} has {count} plans" for request_id, count in doubled]
    return found


def deflated_beside_room(agent: ChaosAgent) -> list[str]:
    """Deflatable VMs that what their host has free would make larger, by what is worth a resize."""
    # One that an operator brought to its size is held there.
    deflatable = [vm for vm in agent.vms.values() if vm.priority is Priority.DEFLATABLE]
    free_to_grow = [vm for vm in deflatable if not vm.held and vm.start_size is None]
    lacking = [row for row in (vm.allocation() for vm in free_to_grow) if not row.nominal.fits_in(row.current)]
    targets = share_room(lacking, agent.free())
    return [
        row.name
        for row in lacking
        if row.name in targets
        and any(gain >= least for gain, least in zip(targets[row.name].less(row.current), SMALLEST_GROWTH, strict=True))
    ]


def _lost(client: Client, present: set[str], preempted: set[str]) -> list[str]:
    """VMs that were placed, that nobody deleted, nor preempted for good (by the record), and that are nowhere."""
    placed = {r.vm for r in client.requests if r.kind == "create" and r.end and r.end["state"] == "done"}
    deleted = {r.vm for r in client.requests if r.kind == "delete" and r.accepted}
    kept = {r.vm for r in client.requests if r.body and r.body.get("vm", {}).get("on_preemption") == "stop"}
    dropped = {r.vm for r in client.requests if r.body and r.body.get("vm", {}).get("on_preemption") == "delete"}
    return [f"{name} is lost" for name in sorted(placed - deleted - (preempted - (kept - dropped)) - present)]

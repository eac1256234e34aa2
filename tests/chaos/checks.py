"""What must be true when everything has come to rest: store, agents and answers tell the same story."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deflation.proportional import share_room
from tests.chaos.agent import ChaosAgent, Watch
from tests.chaos.workload import Client


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


async def settled(database: Path, limit_s: float) -> list[tuple[Any, ...]]:
    """Wait until nothing is to be done any more; what still is after the limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while await asyncio.to_thread(unsettled, database):
                await asyncio.sleep(0.1)
    return await asyncio.to_thread(unsettled, database)


async def violations(database: Path, client: Client, agents: Sequence[ChaosAgent], watch: Watch) -> list[str]:
    """Everything that is wrong, a sentence each."""
    found = [*watch.violations, *client.violations]
    stored = await asyncio.to_thread(
        rows, database, "SELECT name, host, phase, sentence FROM vms WHERE phase <> 'ended' ORDER BY name"
    )
    managed = {(name, host) for name, host, phase, _ in stored if phase == "running"}
    present = {(name, agent.id) for agent in agents for name in agent.vms}
    if managed != present:
        found.append(f"only in the store: {managed - present}; only on hosts: {present - managed}")
    for name, host, phase, why in stored:
        if phase != "running" and (phase != "failed" or host):
            found.append(f"{name} is {phase} on {host}: {why}")
    for agent in agents:
        if not agent.held and (names := _deflated_beside_room(agent)):
            found.append(f"on {agent.id}, which has {agent.free()} free, {names} are still deflated")
    events = await asyncio.to_thread(
        rows, database, "SELECT vm, sentence FROM events WHERE kind IN ('preempting', 'preempted')"
    )
    for name, reason in watch.preempted.items():
        if not any(vm == name and f"reason {reason}" in sentence for vm, sentence in events):
            found.append(f"{name} was preempted (reason {reason}) without a record")
    found += _lost(client, {name for name, _ in present}, watch)
    doubled = await asyncio.to_thread(
        rows, database, "SELECT request_id, count(*) FROM plans GROUP BY request_id HAVING count(*) > 1"
    )
    found += [f"{request_id} has {count} plans" for request_id, count in doubled]
    return found


def _deflated_beside_room(agent: ChaosAgent) -> list[str]:
    """Those that a reinflation would bring nearer to nominal. A harvest VM beyond that is not deflated."""
    rows_by_name = {vm.name: vm.allocation() for vm in agent.vms.values()}
    wanted = share_room(list(rows_by_name.values()), agent.free())
    return [
        name
        for name, target in wanted.items()
        for nominal, now, then in zip(rows_by_name[name].nominal, rows_by_name[name].current, target, strict=True)
        if now < min(then, nominal)
    ]


def _lost(client: Client, present: set[str], watch: Watch) -> list[str]:
    """VMs that were placed, that nobody deleted or preempted, and that are nowhere."""
    placed = {r.vm for r in client.requests if r.kind == "create" and r.end and r.end["state"] == "done"}
    deleted = {r.vm for r in client.requests if r.kind == "delete" and r.accepted}
    return [f"{name} is lost" for name in sorted(placed - deleted - set(watch.preempted) - present)]

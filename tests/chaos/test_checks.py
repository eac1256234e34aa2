"""What chaos calls broken, and what it calls late."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from pathlib import Path
from typing import Any

from ebbtide.deflation.allocations import Priority
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMState, VMStatus
from tests.chaos.agent import ChaosAgent, Watch
from tests.chaos.checks import at_rest, violations
from tests.chaos.workload import Client

STORE = """
CREATE TABLE plans (id, request_id, state, finished);
CREATE TABLE vms (name, host, phase, sentence, owes_removal);
CREATE TABLE hosts (id, owes_reinflation);
CREATE TABLE events (id, at, plan, host, kind, sentence, vm);
"""


async def test_what_may_be_a_matter_of_time_is_late_and_no_rule_that_is_broken(tmp_path: Path) -> None:
    """A VM that is smaller than it could be, one that could come back, a plan that has not ended."""
    agent = ChaosAgent("host-a", Watch(), random.Random(1), cpu_cores=6.0, memory_mib=2600.0)
    agent.vms = {"vm-1": small("vm-1", VMState.RUNNING, 1.0), "vm-2": small("vm-2", VMState.STOPPED, 0.0)}
    database = tmp_path / "m.sqlite"
    with contextlib.closing(sqlite3.connect(database)) as store, store:
        store.executescript(STORE)
        store.execute("INSERT INTO vms VALUES ('vm-1', 'host-a', 'running', '', 0)")
        store.execute("INSERT INTO vms VALUES ('vm-2', 'host-a', 'preempted', '', 0)")
        store.execute("INSERT INTO plans VALUES ('p', 'r', 'placing', 0)")
    late = await at_rest(database, [agent], 0.0)
    assert [sentence.split(" ")[:2] for sentence in late] == [["not", "settled:"], ["vm-2", "waits"], ["on", "host-a,"]]
    client = Client(random.Random(1), "", None)  # type: ignore[arg-type]
    client.vms = no_vms  # type: ignore[method-assign]
    broken = await violations(database, client, [agent], Watch())
    assert not [sentence for sentence in broken if "waits on" in sentence or "deflated" in sentence]


async def no_vms() -> list[Any]:
    return []


def small(name: str, state: VMState, cores: float) -> VMStatus:
    return VMStatus(
        name=name,
        host="host-a",
        domain=f"ebb-host-a.{name}",
        state=state,
        priority=Priority.DEFLATABLE,
        nominal=Vector(cpu_cores=2.0, memory_mib=600.0),
        minimum=Vector(cpu_cores=0.5, memory_mib=300.0),
        current=Vector(cpu_cores=cores, memory_mib=600.0 * (cores > 0)),
        overhead_mib=100.0,
        generation=1,
        guest_connected=True,
        boot_memory_mib=300.0,
    )

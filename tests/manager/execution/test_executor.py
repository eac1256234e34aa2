"""The executor of instructions by itself: which hosts it chooses by their reports, and what it leaves of an answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from cluster_manager.execution.instruction_executor import InstructionExecutor
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.live_migrations import start_live_migration
from cluster_manager.plans.plans import ChooseHosts, Reclaim
from cluster_manager.settings import AgentLimits
from cluster_manager.store.database import Database
from cluster_manager.store.store import Store
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.requests import MigrateRequest
from tests.manager.outcomes import outcome_of
from tests.manager.plan_events import ended, placement, report_of, spec_of
from tests.manager.plans.test_live_migration_plans import HERE, SPEC, read


@pytest.fixture
async def store(database: Database) -> AsyncIterator[Store]:
    store = Store(database, time.time)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def hosts(store: Store) -> Hosts:
    return Hosts(store, 10.0, lambda: 5.0, lambda: 100.0)


@pytest.fixture
def executor(store: Store, hosts: Hosts) -> InstructionExecutor:
    unused: Any = None
    return InstructionExecutor(unused, hosts, store, AgentLimits(), np.random.default_rng(0), 1)


async def test_a_vm_that_runs_goes_where_all_of_it_fits_not_only_what_it_could_start_with(
    hosts: Hosts, executor: InstructionExecutor
) -> None:
    for host, cores in (("b", 1.0), ("c", 1.0), ("d", 1.0), ("e", 32.0)):
        await hosts.take(report_of(host, cpu_cores=cores, memory_mib=3000.0))
    request = MigrateRequest(request_id="request", live=True, deadline_s=60.0)
    begun = start_live_migration("plan", request, SPEC, "home", policy=PlacementPolicy.FIRST_FIT)
    state = begun.next_step(read("home", HERE)).state
    assert isinstance(state.instruction, ChooseHosts)
    chosen, seen = executor.choices(state, state.instruction)
    assert (chosen.hosts, len(seen)) == (("e",), 1)


async def test_of_a_vm_that_is_not_on_record_only_counts_that_a_call_failed(executor: InstructionExecutor) -> None:
    state = placement(spec_of("high-1"))
    reclaim = Reclaim(host="a", step=1, need=Vector(cpu_cores=1.0), deadline_s=1.0)
    size = ResourceVector(3.0, 1000.0)
    broken = outcome_of("theirs", 2, size, size, size).model_copy(update={"errors": ("no", "again no")})
    fine = broken.model_copy(update={"name": "other", "errors": ()})
    event = await executor._ended(state, reclaim, ended("reclaim", OperationState.PARTIAL, vms=(broken, fine)))
    assert (event.operation.vms, event.failed) == ((), (("theirs", "no"),))

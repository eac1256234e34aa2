"""Deadlines of plans where the manager's clock is set while they run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_manager.execution.running_plans import stopwatch
from cluster_manager.plans.plans import Event, Plan
from ebbtide.messages.operations import OperationState
from tests.manager.cluster import cluster_of, vm
from tests.manager.fake_agent import FakeAgent

HOUR_S = 3600.0


@pytest.mark.usefixtures("each_store")
@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
async def test_a_clock_that_is_set_neither_ends_a_plan_nor_lets_it_run_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    async with cluster_of(tmp_path, agent := FakeAgent("host-a", cpu_cores=6.0, memory_mib=2400.0)) as cluster:
        assert cluster.manager is not None
        operations, ahead_s, elapsed = cluster.manager.operations, 0.0, []
        executor = operations._executor
        assert executor is not None
        carry_out = executor.perform

        async def perform(state: Plan, resumed: bool, elapsed_s: Callable[[], float]) -> Event:
            nonlocal ahead_s
            ahead_s += by_s
            event = await carry_out(state, resumed, elapsed_s)
            if state.kind == "create":
                elapsed.append(event.elapsed_s)
            return event

        for name in ("low-1", "low-2"):
            await cluster.create(vm(name))
        monkeypatch.setattr(operations, "_clock", lambda: time.time() + ahead_s)
        monkeypatch.setattr(executor, "perform", perform)
        # It has to deflate them, within three seconds.
        created = await cluster.create(vm("high-1", "fixed", 3.0, 800.0))
        assert created.state is OperationState.DONE, created.sentence
        assert (agent.cores("low-1"), agent.cores("low-2")) == (1.5, 1.5)
        assert all(0.0 < before < after < HOUR_S / 2 for before, after in itertools.pairwise(elapsed))


def test_the_time_of_an_earlier_run_is_counted_once_and_never_below_zero() -> None:
    assert 40.0 <= stopwatch(60.0, lambda: 100.0)() < 50.0
    assert 0.0 <= stopwatch(60.0, lambda: 0.0)() < 10.0

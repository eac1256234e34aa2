"""Since when VMs run, where the host's clock is set while they do."""

from __future__ import annotations

import time

import pytest

from hostagent.control.clock_steps import ClockSteps, clocks, put_right
from hostagent.state.intents import Intent
from hostagent.vm.host import Host
from tests.hostagent.conftest import Command, low_vm
from tests.hostagent.world import World
from tests.waiting import until

HOUR_S = 3600.0
BOOT = 1.7e9


@pytest.mark.parametrize("ahead_s", [8 * HOUR_S, -BOOT])
def test_a_start_that_was_dated_by_a_clock_that_was_wrong_is_dated_by_the_right_one(ahead_s: float) -> None:
    assert put_right(BOOT + ahead_s + 90.0, BOOT + ahead_s, BOOT, 120.0) == pytest.approx(BOOT + 90.0)


@pytest.mark.parametrize("at", [None, BOOT - 1.0, BOOT - 30 * HOUR_S, BOOT + 8 * HOUR_S + 100.0])
def test_what_that_clock_has_not_dated_stays(at: float | None) -> None:
    """A VM that was saved before the boot, or that was started when the clock had been put right."""
    assert put_right(at, BOOT, BOOT + 8 * HOUR_S, 120.0) == at


async def test_vms_are_dated_anew_once_when_the_clock_steps_and_not_for_seconds(
    command: Command, host: Host, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    vm, (domain,), wall = host.vm("low-1"), world.domains.values(), time.time
    was = vm.intent.started_at
    assert was is not None
    booted_at, up_s = clocks()
    steps = ClockSteps(lambda: (booted_at, up_s + 60.0))
    booted_at += 30.0
    assert steps.look([vm]) == []
    booted_at += 8 * HOUR_S
    assert [(dated, round(right - was)) for _, dated, right in steps.look([vm])] == [(was, 28_830)]
    assert steps.look([vm]) == []
    monkeypatch.setattr(time, "time", lambda: wall() + 8 * HOUR_S)
    host.check_requested.set()
    then = pytest.approx(was + 8 * HOUR_S, abs=2.0)
    await until(lambda: Intent.model_validate_json(domain.intent).started_at == then)
    assert vm.status().started_at == then

"""Since when VMs run, where the host's clock is set while they do."""

from __future__ import annotations

import time

import pytest

from hostagent.control.clock_steps import ClockSteps, clocks, date_start, put_right
from hostagent.state.intents import Intent
from hostagent.vm.host import Host
from tests.hostagent.conftest import Command, low_vm
from tests.hostagent.world import World
from tests.waiting import until

HOUR_S = 3600.0
BOOT = 1.7e9


@pytest.mark.parametrize("up_s", [90.0, -0.99])
@pytest.mark.parametrize("ahead_s", [8 * HOUR_S, -BOOT])
def test_a_start_that_was_dated_by_a_clock_that_was_wrong_is_dated_by_the_right_one(
    ahead_s: float, up_s: float
) -> None:
    """Also that of a VM that was started with its host, whose boot the kernel tells in whole seconds."""
    assert put_right(BOOT + ahead_s + up_s, BOOT + ahead_s, BOOT, 120.0) == pytest.approx(BOOT + up_s)


@pytest.mark.parametrize("at", [None, BOOT - 2.0, BOOT - 30 * HOUR_S, BOOT + 8 * HOUR_S + 100.0])
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


async def test_a_vm_that_was_removed_before_its_turn_came_is_not_written_again(
    command: Command, host: Host, world: World
) -> None:
    await command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
    removed, ((name, domain),) = host.vm("low-1"), world.domains.items()
    was = removed.intent.started_at
    assert was is not None
    await command("DELETE", "/v1/vms/low-1?request_id=d")
    world.domains[name], before = domain, domain.intent  # as if another one had its name by now
    await date_start(host, removed, was, was + HOUR_S)
    assert domain.intent == before

"""What a balloon driver said long ago says nothing of now: libvirt gives it to each agent that begins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.cascade.ordinary import FRESH_S, Statement
from ebbtide.deflation.resources import ResourceVector
from hostagent.vm import guest_pressure
from hostagent.vm.guest_pressure import GuestPressure

READ_AT = 1_700_000_000.0
NOMINAL, MINIMUM = ResourceVector(1.0, 1024.0), ResourceVector(1.0, 320.0)
ROW = Allocation("low-1", Priority.DEFLATABLE, NOMINAL, MINIMUM, ResourceVector(1.0, 512.0))


@pytest.fixture
def pressure(monkeypatch: pytest.MonkeyPatch) -> GuestPressure:
    monkeypatch.setattr(guest_pressure, "time", SimpleNamespace(time=lambda: READ_AT))
    return GuestPressure(lambda: ROW, lambda sentence: None, lambda kind, sentence, inputs: None)


def say(pressure: GuestPressure, ordinary: bool, said_at: float) -> None:
    """The driver's word, as read now: next to nothing is available."""
    if ordinary:
        pressure.sample_ordinary(Statement(said_at, 2.0, total_mib=512.0))
    else:
        pressure.sample(2.0, 0, said_at)


@pytest.mark.parametrize("ordinary", [False, True], ids=["our agent", "ordinary guest"])
@pytest.mark.parametrize("age_s", [FRESH_S + 1.0, 3 * 3600.0, -60.0], ids=["seconds old", "hours old", "of later"])
async def test_a_stale_statement_at_an_agents_first_look_is_no_pressure(
    pressure: GuestPressure, ordinary: bool, age_s: float
) -> None:
    say(pressure, ordinary, READ_AT - age_s)
    assert pressure.sentence == ""
    assert pressure.wants.is_zero()


@pytest.mark.parametrize("ordinary", [False, True], ids=["our agent", "ordinary guest"])
async def test_a_fresh_statement_after_a_stale_one_is_pressure(pressure: GuestPressure, ordinary: bool) -> None:
    say(pressure, ordinary, READ_AT - 3600.0)
    say(pressure, ordinary, READ_AT - FRESH_S)
    assert pressure.sentence.startswith("under memory pressure")


@pytest.mark.parametrize("ordinary", [False, True], ids=["our agent", "ordinary guest"])
async def test_a_stale_statement_is_no_new_one_when_the_clock_is_set_back_to_its_time(
    pressure: GuestPressure, ordinary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(pressure, ordinary, READ_AT - 3600.0)
    monkeypatch.setattr(guest_pressure, "time", SimpleNamespace(time=lambda: READ_AT - 3600.0))
    say(pressure, ordinary, READ_AT - 3600.0)
    assert pressure.sentence == ""


@pytest.mark.parametrize("ordinary", [False, True], ids=["our agent", "ordinary guest"])
async def test_what_the_driver_said_last_before_a_reset_is_no_pressure_of_the_guest_that_boots(
    pressure: GuestPressure, ordinary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr(guest_pressure, "_now", lambda: clock)
    say(pressure, ordinary, READ_AT - 1.0)
    assert pressure.sentence
    pressure.boots()
    say(pressure, ordinary, READ_AT - 0.5)
    assert not pressure.sentence
    clock += 2.0
    say(pressure, ordinary, READ_AT - 1.5)
    assert pressure.sentence.startswith("under memory pressure"), "it is of this boot"

"""A guest is asked to power off when it can hear that; its power is cut where it cannot, or does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import libvirt
import pytest

from hostagent.errors import DomainGone
from hostagent.libvirt import libvirt_hypervisor
from hostagent.libvirt.libvirt_hypervisor import _shut_down
from hostagent.libvirt_connection import LibvirtConnection

RUNNING, OFF = (libvirt.VIR_DOMAIN_RUNNING, 1), (libvirt.VIR_DOMAIN_SHUTOFF, 1)
ASLEEP = (libvirt.VIR_DOMAIN_PMSUSPENDED, 0)
PAUSED = libvirt.VIR_DOMAIN_PAUSED


class Guest:
    """A domain, and the connection to it.

    :param missed: how many presses of its button it misses.
    :param held: for how many looks it stays as it is at first.
    :param transient: it is gone with its end.
    """

    def __init__(self, state: tuple[int, int], missed: int = 0, held: int = 0, transient: bool = False) -> None:
        self._state = state
        self._missed = missed
        self._held = held
        self._transient = transient
        self.calls: list[str] = []

    async def call(self, function: Callable[[Any], Any], limit_s: float = 0.0) -> Any:
        if self._transient and self._state == OFF:
            raise DomainGone("no domain with matching name")
        return function(self)

    async def change(self, domain: str, function: Callable[[Any], Any], limit_s: float = 0.0) -> Any:
        return await self.call(function)

    def lookupByName(self, name: str) -> Any:
        return self

    def XMLDesc(self) -> str:
        return "<domain/>"

    def state(self) -> tuple[int, int]:
        if self._held:
            self._held -= 1
            if not self._held:
                self._state = RUNNING
        return self._state

    def isActive(self) -> bool:
        return self._state != OFF

    def pMWakeup(self, flags: int) -> None:
        assert self._state == ASLEEP
        self.calls.append("wake")
        self._state = RUNNING

    def shutdownFlags(self, flags: int) -> None:
        self.calls.append("button" if flags == libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN else "agent")
        self._missed -= 1
        if self._state == RUNNING and self._missed < 0:
            self._state = OFF

    def destroyFlags(self, flags: int) -> None:
        self.calls.append("cut")
        self._state = OFF


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libvirt_hypervisor, "LOOK_S", 0.01)


async def ended(guest: Guest, limit_s: float) -> str:
    return (await _shut_down(cast(LibvirtConnection, guest), "web", limit_s)).sentence


@pytest.mark.parametrize(("missed", "calls"), [(0, ["wake", "button"]), (1, ["wake", "button", "button"])])
async def test_a_guest_that_is_asleep_is_woken_and_asked_and_asked_again_where_it_missed_it(
    missed: int, calls: list[str]
) -> None:
    guest = Guest(ASLEEP, missed)
    assert (await ended(guest, 4.0)).startswith("its guest powered off after")
    assert guest.calls == calls


async def test_a_guest_that_is_asleep_and_does_not_power_off_in_time_is_called_that() -> None:
    guest = Guest(ASLEEP, missed=9)
    said = await ended(guest, 0.2)
    assert said == "its power was cut: its guest, which was asleep, had not powered off after 0.2 s"
    assert guest.calls == ["wake", "button", "button", "agent", "cut"]
    assert await ended(Guest(ASLEEP), 0.0) == "its power was cut: it was asleep"


@pytest.mark.parametrize("why", [libvirt.VIR_DOMAIN_PAUSED_DUMP, libvirt.VIR_DOMAIN_PAUSED_SNAPSHOT])
async def test_a_guest_that_a_dump_or_a_snapshot_holds_for_a_moment_is_asked_after_that(why: int) -> None:
    guest = Guest((PAUSED, why), held=3)
    assert (await ended(guest, 60.0)).startswith("its guest powered off after")
    assert guest.calls == ["button"]
    held = Guest((PAUSED, why))
    assert await ended(held, 0.05) == "its power was cut: it was held paused by a save, a dump or a snapshot"


@pytest.mark.parametrize(
    "why", [libvirt.VIR_DOMAIN_PAUSED_USER, libvirt.VIR_DOMAIN_PAUSED_MIGRATION], ids=["paused", "restored paused"]
)
async def test_a_guest_that_an_operator_has_paused_hears_nothing_and_is_not_waited_for(why: int) -> None:
    guest = Guest((PAUSED, why))
    assert await ended(guest, 3600.0) == "its power was cut: it was paused"
    assert guest.calls == ["cut"]


async def test_a_domain_without_a_definition_that_is_gone_when_its_guest_powers_off_has_ended() -> None:
    assert (await ended(Guest(RUNNING, transient=True), 60.0)).startswith("its guest powered off after")

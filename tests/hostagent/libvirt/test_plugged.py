"""virtio-mem and DIMMs together, on a domain that answers as libvirt does."""

from __future__ import annotations

import asyncio
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any, cast

import libvirt
import pytest

from hostagent.domain_xml.dimms import slot_of
from hostagent.errors import HypervisorError
from hostagent.libvirt import settling
from hostagent.libvirt.libvirt_readings import reading_of
from hostagent.libvirt.plugged import Plugged, bring, missing_dimms
from hostagent.libvirt.qemu_agent import QemuAgents
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.libvirt.sizes import LibvirtSizes
from hostagent.limits.network import Networks
from tests.hostagent.libvirt.one_domain import OneDomain


class FakeDomain:
    """Sizes in MiB; DIMMs by slot."""

    def __init__(self, dimms: dict[int, int], configured: dict[int, int], device: tuple[int, int] | None) -> None:
        self.dimms = dict(dimms)
        self.configured = configured
        #: Whole size and what is plugged.
        self.device = device
        self.stuck: set[int] = set()
        self.requested: list[int] = []
        self.detached: list[int] = []
        #: The most memory that the definition has room for; it boots with 512.
        self.most = 0
        self.block = 2

    def XMLDesc(self, flags: int = 0) -> str:
        dimms = self.configured if flags == libvirt.VIR_DOMAIN_XML_INACTIVE else self.dimms
        rows = [_dimm(slot, size) for slot, size in dimms.items()]
        if self.device is not None:
            size, current = (mib * 1024 for mib in self.device)
            rows.append(
                f"<memory model='virtio-mem'><target><size unit='KiB'>{size}</size>"
                f"<block unit='KiB'>{self.block * 1024}</block>"
                f"<requested unit='KiB'>{current}</requested><current unit='KiB'>{current}</current></target></memory>"
            )
        total, most = (512 + sum(self.dimms.values())) * 1024, self.most * 1024
        head = f"<maxMemory slots='8' unit='KiB'>{most}</maxMemory><memory unit='KiB'>{total}</memory>" if most else ""
        return f"<domain>{head}<devices>{''.join(rows)}</devices></domain>"

    def updateDeviceFlags(self, xml: str, flags: int) -> None:
        assert flags == libvirt.VIR_DOMAIN_AFFECT_LIVE
        assert self.device is not None
        requested = int(ElementTree.fromstring(xml).findtext("target/requested", "")) // 1024
        assert requested % self.block == 0, "libvirt refuses what is no whole block"
        self.requested.append(requested)
        self.device = (self.device[0], requested)

    def detachDeviceFlags(self, xml: str, flags: int) -> None:
        assert flags == libvirt.VIR_DOMAIN_AFFECT_LIVE
        slot = _slot(xml)
        self.detached.append(slot)
        if slot in self.stuck:
            raise libvirt.libvirtError("unplug of device was rejected by the guest")
        del self.dimms[slot]

    def attachDeviceFlags(self, xml: str, flags: int) -> None:
        assert flags == libvirt.VIR_DOMAIN_AFFECT_LIVE
        address = ElementTree.fromstring(xml).find("address")
        if address is None:
            # As libvirt does: the next slot that is free.
            slot = next(number for number in range(8) if number not in self.dimms)
            self.dimms[slot] = int(ElementTree.fromstring(xml).findtext("target/size", "")) // 1024
            return
        slot = _slot(xml)
        assert slot not in self.dimms
        self.dimms[slot] = self.configured[slot]

    @property
    def plugged_mib(self) -> float:
        return Plugged.of(ElementTree.fromstring(self.XMLDesc())).total_mib


def _dimm(slot: int, size: int) -> str:
    target = f"<target><size unit='KiB'>{size * 1024}</size><node>0</node></target>"
    return f"<memory model='dimm'>{target}<address type='dimm' slot='{slot}'/></memory>"


def _slot(xml: str) -> int:
    address = ElementTree.fromstring(xml).find("address")
    assert address is not None
    return int(address.get("slot", ""))


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "LOOK_S", 0.01)
    monkeypatch.setattr(settling, "STALLED_S", 0.05)


async def moved(domain: FakeDomain, goal_mib: float) -> str:
    connection: Any = OneDomain(domain)
    return await bring(connection, "vm", goal_mib, 5.0)


class _Cut(OneDomain):
    """The first request is carried out, but whoever made it is cancelled before the answer."""

    def __init__(self, domain: Any) -> None:
        super().__init__(domain)
        self.asked = asyncio.Event()

    async def adjust(self, domain: str, function: Callable[[Any], Any]) -> Any:
        await self.call(lambda _: function(self._domain))
        if not self.asked.is_set():
            self.asked.set()
            await asyncio.Event().wait()

    def on_open(self, _callback: Any) -> None:
        """It is open."""


class _Held(FakeDomain):
    """Its guest gives nothing so far."""

    def updateDeviceFlags(self, xml: str, flags: int) -> None:
        before = self.device
        super().updateDeviceFlags(xml, flags)
        self.device = before

    def setMemoryFlags(self, kib: int, flags: int) -> None:
        self.requested.append(kib // 1024)

    def memoryStats(self) -> dict[str, int]:
        return {"actual": 512 * 1024}


@pytest.mark.parametrize("device", ["virtio-mem", "balloon"])
async def test_what_a_call_that_is_cancelled_has_asked_of_the_guest_is_called_off(device: str) -> None:
    """Unless it is, the guest goes on giving memory that nobody counts as gone."""
    domain = _Held({}, {}, (512, 512) if device == "virtio-mem" else None)
    connection: Any = _Cut(domain)
    sizes = LibvirtSizes(cast(LibvirtSettings, None), connection, cast(Networks, None), cast(QemuAgents, None))
    bring_down = sizes.set_plugged if device == "virtio-mem" else sizes.set_balloon
    task = asyncio.create_task(bring_down("vm", 128, 60.0))
    async with asyncio.timeout(20.0):
        await connection.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert domain.requested == [128, 512]


BOTH = {0: 256, 1: 256}


@pytest.mark.parametrize(
    ("device", "dimms", "goal", "reached", "reason"),
    [
        ((512, 512), BOTH, 800, 800, ""),
        ((512, 512), BOTH, 512, 512, ""),
        ((512, 512), BOTH, 300, 300, ""),
        ((512, 511 // 2 * 2), BOTH, 299, 300, ""),
        ((512, 100), BOTH, 400, 512, "DIMMs can only be taken as a whole: 112 MiB are left"),
        (None, BOTH, 256, 256, ""),
        (None, BOTH, 100, 256, "DIMMs can only be taken as a whole: 156 MiB are left"),
        (None, BOTH, 0, 0, ""),
    ],
)
async def test_memory_is_taken_by_virtio_mem_first_and_then_by_whole_dimms(
    device: tuple[int, int] | None, dimms: dict[int, int], goal: float, reached: float, reason: str
) -> None:
    domain = FakeDomain(dimms, dimms, device)
    said = await moved(domain, goal)
    assert domain.plugged_mib >= goal
    assert (domain.plugged_mib, said) == (reached, reason)


async def test_a_dimm_is_taken_where_the_blocks_beside_it_are_larger_than_what_is_to_be_taken() -> None:
    domain = FakeDomain(BOTH, BOTH, (1024, 512))
    domain.block = 512
    assert await moved(domain, 768) == ""
    assert (domain.plugged_mib, domain.detached, domain.requested) == (768, [1], [])


@pytest.mark.parametrize(
    ("configured", "device", "goal", "reached", "reason"),
    [
        ({0: 256}, None, 256, 256, ""),
        ({0: 256}, None, 0, 256, ": 256 MiB are left"),
        ({0: 256, 1: 512}, None, 0, 256, ": 256 MiB are left"),
        ({}, None, 0, 512, ": 512 MiB are left"),
        ({}, (512, 512), 0, 512, ": 512 MiB are left"),
    ],
    ids=["another goes", "another goes, it stays", "its slot is another's there", "all are", "beside virtio-mem"],
)
async def test_a_dimm_that_its_owner_attached_to_the_running_domain_only_is_not_taken(
    configured: dict[int, int], device: tuple[int, int] | None, goal: float, reached: float, reason: str
) -> None:
    domain = FakeDomain(BOTH, configured, device)
    said = await moved(domain, goal)
    assert domain.plugged_mib == reached
    assert set(domain.detached) <= configured.keys() - {1}
    none = "DIMMs can only be taken as a whole, and none that is not in the domain's definition"
    assert said == (f"{none}{reason}" if reason else "")


class Read(FakeDomain):
    """With what a reading asks of it besides."""

    def schedulerParametersFlags(self, flags: int) -> dict[str, int]:
        return {}

    def memoryParameters(self, flags: int) -> dict[str, int]:
        return {}

    def memoryStats(self) -> dict[str, int]:
        return {"actual": (512 + sum(self.dimms.values())) * 1024}


@pytest.mark.parametrize(
    ("dimms", "configured", "room", "device_mib", "takeable", "fixed"),
    [
        (BOTH, BOTH, 0, 64, (256, 256), 0),
        (BOTH, {0: 256}, 0, 64, (256,), 256),
        (BOTH, {0: 256, 1: 512}, 0, 64, (256,), 256),
        ({0: 128, 1: 128, 2: 256}, {0: 128}, 2048, None, (128, 128), 256),
        ({0: 128, 1: 128}, {0: 128}, 2048, 64, (128,), 128),
    ],
    ids=["in both", "attached live", "of another size there", "as a new one would be", "beside virtio-mem"],
)
async def test_a_reading_counts_all_that_is_plugged_and_tells_what_of_it_can_be_taken(
    dimms: dict[int, int],
    configured: dict[int, int],
    room: int,
    device_mib: int | None,
    takeable: tuple[int, ...],
    fixed: int,
) -> None:
    domain = Read(dimms, configured, (512, device_mib) if device_mib is not None else None)
    domain.most = room
    reading, _ = reading_of(domain)
    bound = reading.bound(None)
    assert (reading.dimms_mib, bound.dimms_mib, bound.fixed_mib) == (takeable, takeable, fixed)
    assert bound.plugged_mib == sum(dimms.values()) + (device_mib or 0)
    assert (bound.balloon_mib, bound.virtio_mib) == (512, device_mib or 0)


@pytest.mark.parametrize(("ahead_s", "fresh"), [(0.0, True), (300.0, False), (-300.0, False)])
async def test_what_a_balloon_driver_has_said_is_of_now_in_either_direction_of_a_clock(
    monkeypatch: pytest.MonkeyPatch, ahead_s: float, fresh: bool
) -> None:
    domain = Read({}, {}, None)
    said = {"actual": 512 * 1024, "usable": 100 * 1024, "last_update": int(time.time() + ahead_s)}
    monkeypatch.setattr(domain, "memoryStats", lambda: said)
    assert reading_of(domain)[0].usable_mib == (100.0 if fresh else None)


async def test_what_was_plugged_last_goes_first() -> None:
    domain = FakeDomain(BOTH, BOTH, None)
    await moved(domain, 256)
    assert domain.detached == [1]


async def test_a_dimm_that_the_guest_holds_on_to_ends_it_with_the_reason() -> None:
    domain = FakeDomain(BOTH, BOTH, None)
    domain.stuck = {1}
    said = await moved(domain, 0)
    assert said == ("the DIMM in slot 1 stopped at 256 MiB instead of 0 (unplug of device was rejected by the guest)")
    assert domain.detached == [1], "no further DIMM is asked for"
    assert domain.plugged_mib == 512


@pytest.mark.parametrize(
    ("device", "plugged_now", "goal", "reached", "reason"),
    [
        (None, {0: 256}, 512, 512, ""),
        (None, {}, 512, 512, ""),
        (None, {}, 500, 256, "DIMMs can only be plugged as a whole: 244 MiB are left"),
        ((512, 0), {0: 256}, 700, 700, ""),
        ((512, 0), {}, 100, 100, ""),
        ((512, 0), {}, 2000, 1024, "the virtio-mem device has room for 512 MiB only"),
    ],
)
async def test_dimms_come_back_from_the_configuration_and_virtio_mem_gives_the_rest(
    device: tuple[int, int] | None, plugged_now: dict[int, int], goal: float, reached: float, reason: str
) -> None:
    domain = FakeDomain(plugged_now, BOTH, device)
    said = await moved(domain, goal)
    assert (domain.plugged_mib, said) == (reached, reason)


async def test_a_domain_with_nothing_to_plug_says_so() -> None:
    with pytest.raises(HypervisorError, match="neither a virtio-mem device nor DIMMs"):
        await moved(FakeDomain({}, {}, None), 100)


def test_missing_dimms_are_told_by_their_slots() -> None:
    domain = FakeDomain({1: 256}, BOTH, None)
    live, config = (ElementTree.fromstring(domain.XMLDesc(flags)) for flags in (0, libvirt.VIR_DOMAIN_XML_INACTIVE))
    assert [slot_of(dimm) for dimm in missing_dimms(live, config)] == ["0"]


@pytest.mark.parametrize(
    ("goal", "reached", "reason"),
    [
        (512, 512, ""),
        (500, 384, "DIMMs can only be plugged as a whole: 116 MiB are left"),
        (700, 512, "DIMMs can only be plugged as a whole: 188 MiB are left"),
    ],
)
async def test_a_domain_that_was_started_with_fewer_dimms_than_it_has_room_for_is_given_new_ones(
    goal: float, reached: float, reason: str
) -> None:
    domain = FakeDomain({0: 128}, {0: 128}, None)
    domain.most = 1024
    assert (await moved(domain, goal), domain.plugged_mib) == (reason, reached)
    assert await moved(domain, 128) == ""
    assert domain.plugged_mib == 128

"""Limits on interfaces: libvirt where tc shows that it works, ours where not, and nothing of a failed call left."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libvirt
import pytest

from hostagent.errors import HypervisorError, HypervisorTimeout
from hostagent.limits.network import Networks
from hostagent.limits.tc import Tap, TrafficControl
from tests.hostagent.fake_kernel import FakeKernel

MIB = 1 << 20
FREE = ("noqueue", "8001:", 0)
HALF_MADE = ("htb", "1:", 8 * MIB)


@dataclass
class FakeDomain:
    """A domain with taps in a kernel. ``libvirt``: "works", "fails half way", "lies" or "hangs"."""

    kernel: FakeKernel
    libvirt: str = "works"
    active: bool = True
    kinds: tuple[str, ...] = ("ethernet",)
    averages: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)
    calls: int = 0

    def XMLDesc(self) -> str:
        interfaces = ""
        for number, kind in enumerate(self.kinds):
            limited = self.averages.get((f"mac{number}", 1), {}).get("inbound.average", 0) > 0
            bandwidth = "<bandwidth><inbound average='1'/></bandwidth>" if limited else ""
            interfaces += f"<interface type='{kind}'><mac address='mac{number}'/><target dev='vnet{number}'/>"
            interfaces += f"{bandwidth}</interface>"
        return f"<domain><devices>{interfaces}</devices></domain>"

    def isActive(self) -> bool:
        return self.active

    def isPersistent(self) -> bool:
        return True

    def interfaceParameters(self, mac: str, flags: int) -> dict[str, int]:
        return self.averages.get((mac, flags), {"inbound.average": 0, "outbound.average": 0})

    def setInterfaceParameters(self, mac: str, parameters: dict[str, int], flags: int) -> None:
        assert flags in (libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG), "one at a time"
        self.calls += 1
        if self.libvirt == "hangs":
            raise HypervisorTimeout("libvirt did not answer within 15 s")
        average = parameters["inbound.average"]
        if flags == libvirt.VIR_DOMAIN_AFFECT_LIVE and self.libvirt != "lies":
            self._shape(f"vnet{mac.removeprefix('mac')}", average)
        self.averages[mac, flags] = parameters

    def _shape(self, tap: str, average: int) -> None:
        if average == 0:
            # With no limit on record libvirt clears nothing.
            if self.libvirt == "works":
                self.kernel.devices[tap] = FREE
                self.kernel.ingress.pop(tap, None)
            return
        if self.libvirt == "fails half way":
            self.kernel.devices[tap] = HALF_MADE
            raise HypervisorError("Specified qdisc kind is unknown")
        self.kernel.devices[tap] = ("htb", "1:", average * 1000)
        self.kernel.ingress[tap] = f"police 0x1 rate {average * 8}Kbit burst 1Mb mtu 64Kb action drop overhead 0b"


class FakeConnection:
    """The part of the pool that is used here."""

    def __init__(self, domain: FakeDomain) -> None:
        self._domain = domain

    async def call(self, function: Callable[[Any], Any], *, modifies: str | None = None) -> Any:
        return function(self)

    def lookupByName(self, name: str) -> FakeDomain:
        return self._domain


def networks(domain: FakeDomain, tmp_path: Path, namespace: str | None = None) -> Networks:
    for directory in ("netns", "net"):
        (tmp_path / directory).mkdir(exist_ok=True)
    for tap in domain.kernel.devices:
        (tmp_path / ("netns/other" if namespace else f"net/{tap}")).touch()
    connection: Any = FakeConnection(domain)
    return Networks(connection, TrafficControl(domain.kernel.run, tmp_path / "netns", tmp_path / "net"))


@pytest.mark.parametrize("old", [False, True], ids=["", "of a tc before 5.18"])
async def test_libvirt_does_it_where_tc_shows_the_limit(tmp_path: Path, old: bool) -> None:
    domain = FakeDomain(FakeKernel({"vnet0": FREE}, old=old))
    limits = networks(domain, tmp_path)
    for mib_s in (8.0, 2.0):
        assert await limits.limit("vm", mib_s) == ""
        assert await limits.read(ElementTree.fromstring(domain.XMLDesc())) == pytest.approx(mib_s, rel=0.01)
        live, stored = domain.averages["mac0", 1], domain.averages["mac0", 2]
        # libvirt hands its averages to tc as thousands of bytes.
        assert live == stored == dict.fromkeys(("inbound.average", "outbound.average"), int(mib_s * MIB) // 1000)
    assert domain.kernel.commands == []
    assert await limits.limit("vm", None) == ""
    assert domain.kernel.state() == ({"vnet0": FREE}, {})


@pytest.mark.parametrize("old", [False, True], ids=["", "of a tc before 5.18"])
@pytest.mark.parametrize("how", ["fails half way", "lies"])
async def test_what_libvirt_cannot_do_is_taken_back_and_done_by_us(tmp_path: Path, how: str, old: bool) -> None:
    domain = FakeDomain(FakeKernel({"vnet0": FREE}, old=old), libvirt=how)
    limits = networks(domain, tmp_path)
    assert await limits.limit("vm", 8.0) == ""
    assert domain.kernel.devices == {"vnet0": ("tbf", "ebb0:", 8 * MIB), Tap("vnet0").ifb: ("tbf", "ebb0:", 8 * MIB)}
    assert domain.kernel.ingress == {"vnet0": Tap("vnet0").ifb}
    assert all(averages["inbound.average"] == 0 for averages in domain.averages.values())
    calls = domain.calls
    assert await limits.limit("vm", 4.0) == ""
    assert await limits.read(ElementTree.fromstring(domain.XMLDesc())) == 4.0
    assert domain.calls == calls, "libvirt is not tried again"
    assert await limits.limit("vm", None) == ""
    assert domain.kernel.state() == ({"vnet0": FREE}, {})


@pytest.mark.parametrize("ingress", [{}, {"vnet0": ""}], ids=["", "with its ingress, which does nothing"])
async def test_half_of_a_limit_that_an_earlier_call_of_libvirt_left_is_removed(
    tmp_path: Path, ingress: dict[str, str]
) -> None:
    domain = FakeDomain(FakeKernel({"vnet0": HALF_MADE}, dict(ingress)), libvirt="fails half way")
    assert await networks(domain, tmp_path).limit("vm", 8.0) == ""
    assert domain.kernel.devices["vnet0"] == ("tbf", "ebb0:", 8 * MIB)


@pytest.mark.parametrize(("wanted", "left"), [(8.0, ("tbf", "ebb0:", 8 * MIB)), (None, FREE)])
async def test_half_of_a_limit_that_a_call_leaves_after_it_was_given_up_is_removed_whatever_rate_is_wanted_next(
    tmp_path: Path, wanted: float | None, left: tuple[str, str, int]
) -> None:
    domain = FakeDomain(FakeKernel({"vnet0": FREE}), libvirt="hangs")
    limits = networks(domain, tmp_path)
    for mib_s in (2.0, 3.0):  # the second one only waits behind the first
        with pytest.raises(HypervisorTimeout):
            await limits.limit("vm", mib_s)
    domain.kernel.devices["vnet0"], domain.libvirt = ("htb", "1:", 2 * MIB), "fails half way"
    assert await limits.limit("vm", wanted) == ""
    assert domain.kernel.devices["vnet0"] == left


async def test_an_owners_htb_stays_whose_rate_libvirt_was_never_asked_for(tmp_path: Path) -> None:
    domain = FakeDomain(FakeKernel({"vnet0": FREE}), libvirt="hangs")
    limits = networks(domain, tmp_path)
    with pytest.raises(HypervisorTimeout):
        await limits.limit("vm", 2.0)
    domain.kernel.devices["vnet0"] = owners = ("htb", "1:", 5 * MIB)
    with pytest.raises(HypervisorError, match="root qdisc of another program"):
        await limits.limit("vm", 8.0)
    assert await limits.limit("vm", None) == ""
    assert domain.kernel.devices["vnet0"] == owners


async def test_an_htb_that_somebody_else_uses_is_left_alone(tmp_path: Path) -> None:
    domain = FakeDomain(FakeKernel({"vnet0": HALF_MADE}, leaves={"vnet0"}), libvirt="fails half way")
    with pytest.raises(HypervisorError, match="another program"):
        await networks(domain, tmp_path).limit("vm", 8.0)
    assert domain.calls == 0
    assert domain.kernel.commands == []


@pytest.mark.parametrize(
    ("rate", "ingress"),
    [(5 * MIB, {}), (8 * MIB, {"vnet0": "police 0x1 rate 9Mbit burst 1Mb"}), (5 * MIB, {"vnet0": ""})],
    ids=["another rate", "a policer on what comes in", "another rate, and an ingress without a filter"],
)
async def test_an_owners_htb_that_looks_like_libvirts_is_refused_and_stays_with_its_ingress(
    tmp_path: Path, rate: int, ingress: dict[str, str]
) -> None:
    kernel = FakeKernel({"vnet0": ("htb", "1:", rate)}, dict(ingress))
    with pytest.raises(HypervisorError, match="root qdisc of another program"):
        await networks(FakeDomain(kernel), tmp_path).limit("vm", 8.0)
    assert kernel.commands == []
    assert kernel.state() == ({"vnet0": ("htb", "1:", rate)}, ingress)


async def test_nothing_is_done_beside_a_call_of_libvirt_that_hangs(tmp_path: Path) -> None:
    domain = FakeDomain(FakeKernel({"vnet0": FREE}), libvirt="hangs")
    with pytest.raises(HypervisorTimeout):
        await networks(domain, tmp_path).limit("vm", 8.0)
    assert domain.kernel.commands == []


async def test_libvirt_is_not_asked_for_a_tap_in_another_namespace(tmp_path: Path) -> None:
    domain = FakeDomain(FakeKernel({"vnet0": FREE}))
    limits = networks(domain, tmp_path, namespace="other")
    assert await limits.limit("vm", 8.0) == ""
    assert await limits.read(ElementTree.fromstring(domain.XMLDesc())) == 8.0
    assert domain.calls == 0


async def test_two_interfaces_have_equal_shares_of_the_limit(tmp_path: Path) -> None:
    domain = FakeDomain(FakeKernel({"vnet0": FREE, "vnet1": FREE}), libvirt="lies", kinds=("ethernet", "bridge"))
    limits = networks(domain, tmp_path)
    assert await limits.limit("vm", 8.0) == ""
    assert {domain.kernel.devices[tap][2] for tap in ("vnet0", "vnet1")} == {4 * MIB}
    assert await limits.read(ElementTree.fromstring(domain.XMLDesc())) == 8.0


async def test_one_interface_without_a_limit_makes_the_whole_unlimited(tmp_path: Path) -> None:
    domain = FakeDomain(FakeKernel({"vnet0": FREE, "vnet1": FREE}), libvirt="lies", kinds=("ethernet", "ethernet"))
    limits = networks(domain, tmp_path)
    await limits.limit("vm", 8.0)
    domain.kernel.devices["vnet1"] = FREE
    assert await limits.read(ElementTree.fromstring(domain.XMLDesc())) is None


async def test_a_limit_is_never_zero(tmp_path: Path) -> None:
    domain = FakeDomain(FakeKernel({"vnet0": FREE}), libvirt="lies")
    assert await networks(domain, tmp_path).limit("vm", 0.0) == ""
    assert domain.kernel.devices["vnet0"][2] == MIB


@pytest.mark.parametrize(
    ("kinds", "active", "why"),
    [
        (("user",), True, "which has no device on the host"),
        ((), True, "the domain has no network interface"),
        (("ethernet",), False, "the domain does not run"),
    ],
)
async def test_what_cannot_be_limited_is_said_in_words(
    tmp_path: Path, kinds: tuple[str, ...], active: bool, why: str
) -> None:
    domain = FakeDomain(FakeKernel({"vnet0": FREE}), kinds=kinds, active=active)
    limits = networks(domain, tmp_path)
    assert why in await limits.limit("vm", 8.0)
    assert await limits.limit("vm", None) == "", "there is nothing to lift"
    assert domain.kernel.commands == []


async def test_a_tap_that_is_gone_reads_as_no_limit_and_cannot_be_limited(tmp_path: Path) -> None:
    domain = FakeDomain(FakeKernel({}))
    limits = networks(domain, tmp_path)
    assert await limits.read(ElementTree.fromstring(domain.XMLDesc())) is None
    with pytest.raises(HypervisorError, match="holds a device vnet0"):
        await limits.limit("vm", 8.0)

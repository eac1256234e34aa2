"""Limits on the interfaces of a domain: through libvirt where that is seen to work, else by our own ``tc``.

libvirt needs qdiscs that not every kernel has (SFQ, a policer) and reaches only taps in its own network namespace; a
call of its that fails can leave half of a limit. So its answer is believed only when ``tc`` shows the limit, and else
taken back (docs/internals/contracts.md, safety of the guest, network).
"""

from __future__ import annotations

import asyncio
import contextlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import libvirt
import structlog

from ebbtide.deflation.floors import HARD_FLOOR
from hostagent.errors import DomainGone, HypervisorError, HypervisorTimeout, TrafficControlError
from hostagent.libvirt_connection import LibvirtConnection
from hostagent.limits.bandwidth import MIB, is_ours, network_blocked, network_blocked_in
from hostagent.limits.tc import LIBVIRTS_ROOT, Shape, Tap, TrafficControl

#: libvirt calls its unit of bandwidth a kilobyte and hands it to tc as `kbps`, which is 1000 bytes/s.
LIBVIRTS_UNIT: Final = 1000
#: tc prints rates rounded to thousands of bits.
ROUNDING: Final = 0.02
DIRECTIONS: Final = ("inbound", "outbound")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface of a running domain."""

    #: The device on the host.
    device: str
    #: By its MAC address libvirt finds it in the running domain and in its configuration.
    mac: str
    #: Whether libvirt has a limit on it, by its own account.
    limited: bool


@dataclass(frozen=True, slots=True)
class _Found:
    xml: str
    active: bool

    @property
    def interfaces(self) -> list[Interface]:
        return interfaces_of(ElementTree.fromstring(self.xml)) if self.active else []


class Networks:
    """Limits and reads the bandwidth of domains' interfaces."""

    def __init__(self, connection: LibvirtConnection, control: TrafficControl | None = None) -> None:
        self._connection = connection
        self._control = control or TrafficControl()
        self._locks: dict[str, asyncio.Lock] = {}
        #: Set when libvirt has failed once: what its kernel lacks, it lacks for all taps.
        self._libvirt_cannot = ""
        #: What libvirt was asked for, bytes/s by tap, since it has last held one: of a call that was given up, or of
        #: one that waited behind it, half may come to be left.
        self._asked: dict[str, set[int]] = {}
        #: One at a time: a domain that is stopped by a command may be seen to have ended, too.
        self._removing = asyncio.Lock()

    async def limit(self, domain: str, network_mib_s: float | None) -> str:
        """Limit a domain's interfaces each way, all of them together; None lifts the limit.

        :returns: why it is not as asked for; empty if it is.
        :raises HypervisorError: libvirt, ``tc`` or ``ip`` failed.
        """
        async with self._locks.setdefault(domain, asyncio.Lock()):
            found = await self._find(domain)
            why = network_blocked(found.xml)
            if not why and not found.active:
                why = "the domain does not run, and only then have its interfaces devices that can be limited"
            if why:
                return "" if network_mib_s is None else why
            interfaces = found.interfaces
            for interface in interfaces:
                tap = await self._control.find(interface.device)
                if network_mib_s is None:
                    await self._lift(domain, interface, tap)
                else:
                    await self._limit(domain, interface, tap, _share_of(network_mib_s, len(interfaces)))
            if network_mib_s is None:
                return ""
            has = await self._rate(interfaces)
            wanted = max(network_mib_s, HARD_FLOOR.network_mib_s)
            if not _is_near(has, wanted):
                return f"the interfaces have {'no limit' if has is None else f'{has:g} MiB/s'} instead of {wanted:g}"
            return ""

    async def read(self, root: ElementTree.Element) -> float | None:
        """What a running domain's interfaces can move each way, MiB/s, as ``tc`` says; None without a limit.

        :param root: the domain's XML.
        """
        if network_blocked_in(root):
            return None
        try:
            return await self._rate(interfaces_of(root))
        except TrafficControlError as error:
            # Read at every check: logged where a limit is asked for.
            log.debug("a limit on interfaces cannot be read, so none is counted", why=str(error))
            return None

    async def forget(self, devices: list[str]) -> None:
        """Remove what is ours of the taps of a domain that is gone; failures are logged."""
        async with self._removing:
            for device in devices:
                self._asked.pop(device, None)
                await self._control.forget(device)

    async def sweep(self) -> None:
        """Remove what is left of domains that went while no agent ran, or by themselves; failures are logged."""
        try:
            async with self._removing:
                await self._control.sweep()
        except TrafficControlError as error:
            log.warning("limits on taps that are gone cannot be looked for", why=str(error))

    async def _rate(self, interfaces: list[Interface]) -> float | None:
        total = 0
        for interface in interfaces:
            rate = (await self._control.look(await self._control.find(interface.device))).rate
            if rate is None:
                return None
            total += rate
        return total / MIB if interfaces else None

    async def _limit(self, domain: str, interface: Interface, tap: Tap, bytes_s: int) -> None:
        shape = await self._control.look(tap)
        if self._is_left_over(interface, shape, bytes_s):
            log.warning("removing what a failed call of libvirt has left on a tap", tap=tap.name, domain=domain)
            await self._control.clear(tap)
            shape = await self._control.look(tap)
        if (shape.root == LIBVIRTS_ROOT and interface.limited) or self._may_try_libvirt(tap, shape):
            why = await self._by_libvirt(domain, interface, tap, bytes_s)
            if not why:
                return
            self._libvirt_cannot = why
            log.info("libvirt cannot limit interfaces here, so we do it ourselves", tap=tap.name, why=why)
        await self._control.limit(tap, bytes_s)

    def _is_left_over(self, interface: Interface, shape: Shape, *rates: int) -> bool:
        """Whether half of a limit stands there that libvirt was asked for. Of any other rate it is an owner's own."""
        asked = (*rates, *self._asked.get(interface.device, ()))
        return shape.half_made and not interface.limited and any(_is_near(shape.to_guest, rate) for rate in asked)

    def _may_try_libvirt(self, tap: Tap, shape: Shape) -> bool:
        free = shape.root is None and not shape.ingress
        return free and tap.namespace is None and not self._libvirt_cannot

    async def _by_libvirt(self, domain: str, interface: Interface, tap: Tap, bytes_s: int) -> str:
        """Let libvirt do it, and see by ``tc`` whether it has; if not, take back all that it did.

        :returns: why it cannot; empty if it has.
        :raises HypervisorTimeout: it did not answer, so it may still be at it.
        """
        average = bytes_s // LIBVIRTS_UNIT
        self._asked.setdefault(interface.device, set()).add(bytes_s)
        try:
            await self._set(domain, interface, average)
            said = await self._on(
                domain, lambda d: d.interfaceParameters(interface.mac, libvirt.VIR_DOMAIN_AFFECT_LIVE)
            )
            shape = await self._control.look(tap)
            has = (shape.to_guest, shape.from_guest)
            said_so = all(said.get(f"{way}.average") == average for way in DIRECTIONS)
            if said_so and all(_is_near(rate, bytes_s) for rate in has):
                self._asked.pop(interface.device, None)
                return ""
            why = f"libvirt took the limit, but tc shows {has[0]} and {has[1]} bytes/s instead of {bytes_s}"
        except (HypervisorTimeout, DomainGone):
            raise
        except HypervisorError as error:
            why = str(error).strip()
        with contextlib.suppress(HypervisorError):
            await self._set(domain, interface, 0)
        await self._control.clear(tap)
        return why

    async def _lift(self, domain: str, interface: Interface, tap: Tap) -> None:
        # A tap that was moved to another namespace has lost its qdiscs, and libvirt does not reach it there.
        if interface.limited and tap.namespace is None:
            await self._set(domain, interface, 0)
        if interface.device in self._asked and self._is_left_over(interface, await self._control.look(tap)):
            await self._control.clear(tap)
        await self._control.lift(tap)

    async def _set(self, domain: str, interface: Interface, average: int) -> None:
        """Live and for later starts; 0 lifts the limit."""
        parameters = _averages(average)

        def change(d: Any) -> None:
            # Two calls: the Python binding reads the parameters first, which takes one flag only.
            d.setInterfaceParameters(interface.mac, parameters, libvirt.VIR_DOMAIN_AFFECT_LIVE)
            if d.isPersistent():
                d.setInterfaceParameters(interface.mac, parameters, libvirt.VIR_DOMAIN_AFFECT_CONFIG)

        await self._on(domain, change, modifies=domain)

    async def _find(self, domain: str) -> _Found:
        found: _Found = await self._on(domain, lambda d: _Found(d.XMLDesc(), bool(d.isActive())))
        return found

    async def _on(self, domain: str, function: Callable[[Any], Any], modifies: str | None = None) -> Any:
        return await self._connection.call(lambda c: function(c.lookupByName(domain)), modifies=modifies)


def _is_near(rate: float | None, wanted: float) -> bool:
    return rate is not None and abs(rate - wanted) <= wanted * ROUNDING


def limit_interfaces_at_start(domain: Any, root: ElementTree.Element, network_mib_s: float) -> None:
    """Have a domain's definition hold its interfaces no lower and no higher than its size, where it holds them at all.

    A definition without our limit gets none: whether libvirt can keep one is seen only while the domain runs. Blocks.

    :param root: its definition.
    :param network_mib_s: 0: it is sold no bandwidth, and nothing is touched.
    """
    if network_mib_s <= 0 or network_blocked_in(root):
        return
    interfaces = root.findall("./devices/interface")
    parameters = _averages(_share_of(network_mib_s, len(interfaces)) // LIBVIRTS_UNIT)
    for interface in interfaces:
        mac, limit = interface.find("mac"), interface.find("bandwidth")
        if mac is not None and limit is not None and is_ours(limit):
            domain.setInterfaceParameters(mac.get("address"), parameters, libvirt.VIR_DOMAIN_AFFECT_CONFIG)


def _share_of(network_mib_s: float, interfaces: int) -> int:
    """What each interface gets, bytes a second. Equal shares: whichever of them is used, the sum holds."""
    return int(max(network_mib_s, HARD_FLOOR.network_mib_s) / interfaces * MIB)


def _averages(average: int) -> dict[str, int]:
    return {f"{way}.average": average for way in DIRECTIONS}


def interfaces_of(root: ElementTree.Element) -> list[Interface]:
    """The interfaces of a running domain's XML that have a device on the host."""
    found = []
    for interface in root.findall("./devices/interface"):
        target, mac = interface.find("target"), interface.find("mac")
        device = target.get("dev") if target is not None else None
        if device and mac is not None:
            found.append(Interface(device, mac.get("address", ""), interface.find("bandwidth") is not None))
    return found

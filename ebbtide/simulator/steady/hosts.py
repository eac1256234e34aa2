"""One host of the simulation: its VMs, its memory, and the three ways to have room: asked for, steady, ballooned.

Who gives how much is decided by the functions that the live system calls: `split_need`, `share_room`, `Trimmer`,
`ReserveLearner`, `PressureWatch`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from ebbtide.deflation.allocations import Allocation, deflatable_capacity, free_capacity
from ebbtide.deflation.cascade.pressure import PressureWatch
from ebbtide.deflation.resources import ResourceVector
from ebbtide.deflation.sharing.proportional import share_room, split_need
from ebbtide.deflation.sharing.reserve import ReserveLearner, reserve_of
from ebbtide.deflation.trimming import Trimmer, TrimRow
from ebbtide.simulator.steady.guests import Guest
from ebbtide.simulator.steady.proxmox import Ballooned, ballooned

#: The schemes.
REACTIVE: Final = "reactive"
STEADY: Final = "steady"
PROXMOX: Final = "proxmox-like"
SCHEMES: Final = (REACTIVE, STEADY, PROXMOX)
#: Between two looks at a host, in seconds: that of Proxmox and of steady mode.
LOOK_S: Final = 10.0


@dataclass(slots=True)
class Member:
    """A VM on a host; a fixed one has no guest that matters."""

    allocation: Allocation
    guest: Guest | None
    watch: PressureWatch = field(default_factory=PressureWatch)
    pressed: bool = False

    @property
    def deflated(self) -> bool:
        return self.allocation.current.memory_mib < self.allocation.nominal.memory_mib - 1e-6


@dataclass(slots=True)
class Totals:
    """What all hosts of a run did, MiB and pages."""

    trimmed_mib: float = 0.0
    given_back_mib: float = 0.0
    reclaimed_mib: float = 0.0
    refaults: float = 0.0


@dataclass(slots=True)
class SimulatedHost:
    """A host.

    :param reclaim_mib_s: how fast memory comes when it is asked for; ``begins_s``: what a reclaim takes besides.
    """

    name: str
    capacity: ResourceVector
    scheme: str
    reclaim_mib_s: float
    begins_s: float
    asked_mib: float | None
    totals: Totals
    vms: dict[str, Member] = field(default_factory=dict)
    trimmer: Trimmer = field(default_factory=Trimmer)
    learner: ReserveLearner = field(default_factory=ReserveLearner)
    reserve_mib: float = 0.0
    #: Until when memory is being reclaimed.
    busy_until_s: float = 0.0
    _now_s: float = 0.0
    _known: tuple[ResourceVector, ResourceVector] | None = None

    def rows(self) -> list[Allocation]:
        return [vm.allocation for vm in self.vms.values()]

    def free(self) -> ResourceVector:
        return self._room()[0]

    def deflatable(self) -> ResourceVector:
        return self._room()[1]

    def _room(self) -> tuple[ResourceVector, ResourceVector]:
        """What is free and what deflation could free, reckoned where something has changed."""
        if self._known is None:
            rows = self.rows()
            self._known = free_capacity(self.capacity, rows), deflatable_capacity(rows)
        return self._known

    def _resize(self, name: str, size: ResourceVector) -> None:
        """A VM reaches a size, after it has lived until now at the one that it had."""
        vm = self.vms[name]
        self._live(vm)
        vm.allocation = replace(vm.allocation, current=size)
        self._known = None

    def _resize_memory(self, name: str, memory_mib: float) -> None:
        self._resize(name, self.vms[name].allocation.current.with_component("memory_mib", memory_mib))

    def live_until(self, now_s: float) -> None:
        """Let guests live on at the sizes that they have; those that lack nothing, and have not just been
        short of it, when they are looked at next.
        """
        self._now_s = now_s
        for vm in self._guests():
            if vm.deflated or vm.pressed:
                self._live(vm)

    def _live(self, vm: Member) -> None:
        if vm.guest is None or self._now_s <= vm.guest.now_s:
            return
        size = vm.allocation.current.memory_mib
        self.totals.refaults += vm.guest.live_until(self._now_s, size)
        vm.watch.observe(self._now_s, vm.guest.reading(size))
        vm.pressed = vm.watch.verdict(self._now_s, vm.allocation).under_pressure

    def take(self, now_s: float, vm: Allocation, guest: Guest | None) -> float:
        """Take a VM that fits by deflation at the most; how long it has to wait for its room, 0 if it fits at once."""
        self.live_until(now_s)
        if self.scheme == STEADY:
            self.learner.arrived(now_s, vm.charge.memory_mib)
        need = vm.charge.less(self.free())
        wait_s = 0.0
        if not need.is_zero():
            for name, size in split_need(self.rows(), need).targets.items():
                self.totals.reclaimed_mib += self.vms[name].allocation.current.memory_mib - size.memory_mib
                self._resize(name, size)
        if need.memory_mib > 0:
            # Quotas of CPU take no time to speak of.
            begins_s = max(self.busy_until_s, now_s)
            self.busy_until_s = begins_s + self.begins_s + need.memory_mib / self.reclaim_mib_s
            wait_s = self.busy_until_s - now_s
        self.vms[vm.name] = Member(vm, guest)
        self._known = None
        return wait_s

    def leave(self, now_s: float, name: str) -> None:
        """A VM departs."""
        self.live_until(now_s)
        del self.vms[name]
        self._known = None

    def look(self, now_s: float) -> None:
        """What a host does by itself every ten seconds."""
        self.live_until(now_s)
        if now_s < self.busy_until_s:
            self.learner.waits(now_s)
            return  # not beside an operation
        self._relieve()
        match self.scheme:
            case "steady":
                self._trim(now_s)
                self._grow(self.reserve_mib)
            case "proxmox-like":
                self._balloon()
            case _:
                self._grow(0.0)

    def _guests(self) -> Iterable[Member]:
        return (vm for vm in self.vms.values() if vm.guest is not None)

    def _relieve(self) -> None:
        """Guests under pressure get what is free, whatever the scheme."""
        for vm in self._guests():
            if vm.pressed and vm.deflated:
                row = vm.allocation
                more = min(row.nominal.memory_mib - row.current.memory_mib, self.free().memory_mib)
                if more > 0:
                    self._resize_memory(row.name, row.current.memory_mib + more)

    def _grow(self, kept_mib: float) -> None:
        """What is free goes back to those that lack something, but for what is kept."""
        room = self.free().less(ResourceVector(memory_mib=kept_mib))
        if room.is_zero():
            return
        rows = [vm.allocation for vm in self.vms.values() if not vm.allocation.nominal.fits_in(vm.allocation.current)]
        if rows:
            for name, size in share_room(rows, room).items():
                self._resize(name, size)

    def _trim(self, now_s: float) -> None:
        learned = self.learner.learned_mib(now_s)
        self.reserve_mib = reserve_of(self.asked_mib, learned, self.capacity.memory_mib)
        free_mib = self.free().memory_mib
        filling = self.trimmer.is_filling(free_mib, self.reserve_mib)
        self.learner.observe(now_s, filling)
        watched = [vm for vm in self._guests() if filling or vm.deflated]
        for vm in watched:
            if vm.guest is not None:
                self._live(vm)
                reading = vm.guest.reading(vm.allocation.current.memory_mib)
                self.trimmer.observe(now_s, vm.allocation.name, reading)
        rows = [TrimRow(vm.allocation, not vm.pressed, not vm.pressed) for vm in self._guests()]
        for name, step in self.trimmer.steps(now_s, rows, free_mib, self.reserve_mib).items():
            more = step.memory_mib - self.vms[name].allocation.current.memory_mib
            self.totals.given_back_mib += max(more, 0.0)
            self.totals.trimmed_mib += max(-more, 0.0)
            self._resize_memory(name, step.memory_mib)

    def _balloon(self) -> None:
        rows = []
        for vm in self._guests():
            self._live(vm)
            one = vm.allocation
            free = vm.guest.free_mib(one.current.memory_mib) if vm.guest is not None else 0.0
            rows.append(
                Ballooned(one.name, one.current.memory_mib, one.minimum.memory_mib, one.nominal.memory_mib, free)
            )
        used = self.capacity.memory_mib - self.free().memory_mib
        for name, size in ballooned(rows, used, self.capacity.memory_mib).items():
            more = size - self.vms[name].allocation.current.memory_mib
            more = min(more, self.free().memory_mib)
            self.totals.given_back_mib += max(more, 0.0)
            self.totals.trimmed_mib += max(-more, 0.0)
            self._resize_memory(name, self.vms[name].allocation.current.memory_mib + more)
        # Its rule knows memory only; CPU comes back as in the other schemes.
        cores = ResourceVector(self.free().cpu_cores)
        rows_of_cores = [row for row in self.rows() if row.current.cpu_cores < row.nominal.cpu_cores]
        if rows_of_cores and not cores.is_zero():
            for name, grown in share_room(rows_of_cores, cores).items():
                self._resize(name, grown)

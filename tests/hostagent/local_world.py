"""A make-believe host inside the test's own loop: domains that move in faked time, and a judge that sees all.

It outlives the agents over it. Whatever must never be done to a VM is written down in ``blames`` at the moment it is
done, whoever notices later.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.bounds import EMULATOR_SHARE
from ebbtide.deflation.floors import HARD_FLOOR
from ebbtide.deflation.resources import ResourceVector
from hostagent.errors import HypervisorError
from hostagent.libvirt.hypervisor import HostSideReading
from hostagent.state.intents import Intent
from tests.hostagent.local_guest import Conversation, Guest, Manner

#: Sizes are set in pages and microseconds: differences below this are nobody's fault.
ROUNDING = ResourceVector(cpu_cores=0.011, memory_mib=2.5, disk_mib_s=0.5, network_mib_s=0.5)


@dataclass
class Domain:
    """One domain: what the hypervisor allows, what was asked of the guest, and the guest. Memory in MiB."""

    intent: Intent
    vcpus: int
    boot_mib: float
    #: The most that virtio-mem can plug.
    device_mib: float
    guest: Guest
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    state: str = "paused"
    #: Of its memory that was saved to disk, from which it goes on; None: there is none.
    saved_mib: float | None = None
    quota: float | None = None
    #: Cap of the whole domain, in cores.
    cap: float | None = None
    balloon_mib: float = 0.0
    balloon_wanted_mib: float = 0.0
    plugged_mib: float = 0.0
    plugged_wanted_mib: float = 0.0
    disk_mib_s: float | None = None
    network_mib_s: float | None = None
    limit_mib: float | None = None
    shares: int | None = None
    #: Quota and plugged memory that it is started with by whoever starts it.
    starts_quota: float | None = None
    starts_cap: float | None = None
    starts_plugged_mib: float = 0.0
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    #: How fast memory moves, and below what each device stops half way.
    speed_mib_s: float = 2000.0
    balloon_stuck_mib: float = 0.0
    plugged_stuck_mib: float = 0.0
    vcpu_seconds: list[float] = field(default_factory=list)
    moved_at: float = 0.0
    grown_at: float = -1e9
    #: Whether its disk is kept: its guest has run, or may have.
    kept: bool = False
    #: Somebody else changed what it may have, and the agent has not had the time to put it right.
    disturbed: bool = False
    #: As far as its agent knows, it could not be started.
    given_up: bool = False
    #: When somebody else took it over.
    taken_at: float = 0.0
    conversations: list[Conversation] = field(default_factory=list)

    @property
    def held_mib(self) -> float:
        return self.balloon_mib + self.plugged_mib

    @property
    def priority(self) -> Priority:
        return self.intent.spec.priority

    @property
    def allocation(self) -> Allocation:
        return self.intent.spec.allocation(self.intent.spec.nominal.vector())

    def start(self, now: float) -> None:
        """Start afresh from what is written in its definition: nothing that was set while it ran is left."""
        self.limit_mib = self.disk_mib_s = self.network_mib_s = None
        self.quota, self.cap = self.starts_quota, self.starts_cap
        self.balloon_mib = self.balloon_wanted_mib = self.boot_mib
        self.plugged_mib = self.plugged_wanted_mib = self.starts_plugged_mib
        self.vcpu_seconds = [0.0] * self.vcpus
        self.moved_at = now
        self.guest.boot(self.vcpus, now)
        self.hang_up()

    def reset(self, now: float) -> None:
        """The guest reboots: requests to its devices stand, but virtio-mem is plugged anew by the new kernel."""
        self.plugged_mib = 0.0
        self.guest.boot(self.vcpus, now)
        self.hang_up()

    def hang_up(self) -> None:
        for conversation in self.conversations:
            conversation.hang_up()
        self.conversations.clear()

    @property
    def touchable_mib(self) -> float:
        """What its guest may touch, whatever of it may be in memory."""
        return max(self.balloon_mib, self.balloon_wanted_mib) + max(self.plugged_mib, self.plugged_wanted_mib)

    def may_hold(self) -> ResourceVector:
        """The most it can come to hold without anybody's doing more than has been done."""
        nominal = self.intent.spec.nominal
        online = len(self.guest.online)
        memory_mib = self.touchable_mib
        return ResourceVector(
            min(
                online * (self.quota if self.quota is not None else 1.0),
                float(online) if self.cap is None else self.cap / (1 + EMULATOR_SHARE),
            ),
            memory_mib if self.limit_mib is None else min(memory_mib, self.limit_mib),
            nominal.disk_mib_s if self.disk_mib_s is None else min(self.disk_mib_s, nominal.disk_mib_s),
            nominal.network_mib_s if self.network_mib_s is None else min(self.network_mib_s, nominal.network_mib_s),
        )

    def reading(self, now: float) -> HostSideReading:
        usable_mib = max(self.held_mib - self.guest.needs_mib, 0.0)
        return HostSideReading(
            self.vcpus,
            self.quota,
            self.balloon_mib,
            max(self.plugged_mib, self.plugged_wanted_mib),
            self.disk_mib_s,
            self.network_mib_s,
            self.limit_mib,
            self.shares,
            usable_mib=usable_mib if now > self.guest.boots_until else None,
            cap_cores=self.cap,
        )

    def move(self, now: float) -> None:
        """Let time pass for the guest and its devices."""
        seconds, self.moved_at = max(now - self.moved_at, 0.0), now
        if self.state != "running" or now < self.guest.boots_until:
            return
        online = self.guest.online
        share = min(1.0 if self.quota is None else self.quota, (self.cap or self.vcpus) / max(len(online), 1))
        for cpu in online:
            self.vcpu_seconds[cpu] += seconds * 0.6 * share
        step = seconds * self.speed_mib_s
        lowest = max(self.balloon_wanted_mib, min(self.balloon_stuck_mib, self.balloon_mib))
        self.balloon_mib = _toward(self.balloon_mib, lowest, step)
        # A block goes only where its pages find room elsewhere: unplugging kills nothing, it stops.
        room = self.guest.needs_mib - self.balloon_mib
        lowest = max(self.plugged_wanted_mib, min(max(self.plugged_stuck_mib, room), self.plugged_mib))
        self.plugged_mib = _in_blocks(self.plugged_mib, _toward(self.plugged_mib, lowest, step))


@dataclass
class LocalWorld:
    """All domains of a host, what befalls them, and what the agents over it did wrong."""

    loop: asyncio.AbstractEventLoop
    random: Random
    domains: dict[str, Domain] = field(default_factory=dict)
    #: Swap that backs limits on memory, MiB.
    swap_mib: float = 0.0
    #: Room on the disk for saved memory, MiB.
    save_room_mib: float = 4000.0
    blames: list[str] = field(default_factory=list)
    #: Names of domains that an agent has been told to remove and has not removed yet.
    terminating: set[str] = field(default_factory=set)
    listeners: list[Callable[[str, bool], None]] = field(default_factory=list)
    slowest_s: float = 0.05
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    diary: deque[str] = field(default_factory=lambda: deque(maxlen=40))

    def now(self) -> float:
        return self.loop.time()

    def latency(self) -> float:
        return self.random.uniform(0.0, self.slowest_s)

    def note(self, name: str, what: str) -> None:
        """Remember what was done last, for whoever has to find out how it came to a blame."""
        self.diary.append(f"{self.now():.2f} s, {name}: {what}")

    def blame(self, name: str, what: str) -> None:
        self.blames.append(f"{self.now():.2f} s, {name}: {what}")

    def find(self, name: str) -> Domain:
        """:raises KeyError: there is no such domain."""
        domain = self.domains[name]
        domain.move(self.now())
        self.judge(name, domain)
        return domain

    def running(self, name: str) -> Domain:
        """:raises HypervisorError: it does not run, so nothing live can be set or read."""
        domain = self.find(name)
        if domain.state == "stopped":
            raise HypervisorError("Requested operation is not valid: domain is not running")
        return domain

    def afterwards(self, seconds: float, work: Callable[[], None]) -> None:
        """What the hypervisor does though nobody waits for it any more."""

        async def later() -> None:
            await asyncio.sleep(seconds)
            work()

        task = self.loop.create_task(later(), name="world")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def request_check(self, name: str) -> None:
        for listener in self.listeners:
            listener(name, False)

    # --- the judge -----------------------------------------------------------------------------------------------

    def judge_all(self) -> None:
        for name in self.domains:
            self.find(name)

    def judge(self, name: str, domain: Domain) -> None:
        """Whether a VM has been killed by a limit of ours."""
        if domain.state != "running":
            return
        if domain.limit_mib is not None and domain.held_mib > domain.limit_mib + self.swap_mib + 1.0:
            self.blame(name, f"killed: it can touch {domain.held_mib:g} MiB, may {domain.limit_mib:g}, swap is short")
        guest = domain.guest
        if guest.needs_mib > domain.held_mib + 1.0:
            self.blame(name, f"killed in the guest: it needs {guest.needs_mib:g} MiB and has {domain.held_mib:g}")

    def judge_memory(self, name: str, domain: Domain, balloon_mib: float, plugged_mib: float) -> None:
        """Whether memory may be asked for like this."""
        size, before = balloon_mib + plugged_mib, domain.balloon_wanted_mib + domain.plugged_wanted_mib
        allocation, floor = domain.allocation, domain.guest.told_floor_mib
        if size > allocation.upper.memory_mib + 1.0:
            self.blame(name, f"was given {size:g} MiB, more than it may ever have ({allocation.upper.memory_mib:g})")
        # What is no longer asked for, though it has not been taken, takes nothing.
        if size >= min(before, domain.held_mib) - 1e-6:
            return
        if domain.priority is Priority.FIXED:
            self.blame(name, f"fixed, but was brought from {before:g} to {size:g} MiB")
        if size < allocation.minimum.memory_mib - 1.0:
            self.blame(name, f"was brought to {size:g} MiB, its minimum is {allocation.minimum.memory_mib:g}")
        if balloon_mib < domain.balloon_wanted_mib and balloon_mib < HARD_FLOOR.memory_mib - 1e-6:
            self.blame(name, f"its boot memory was brought to {balloon_mib:g} MiB")
        if floor is None:
            self.blame(name, "memory was taken without a reading of the guest")
        elif size < floor - 1.0:
            self.blame(name, f"was brought to {size:g} MiB, though the guest needs {floor:g}")
        told = domain.guest.told_pressed_at
        if told is not None and self.now() - told > 5.0:
            self.blame(name, f"was brought to {size:g} MiB under pressure")

    def judge_limits(self, name: str, domain: Domain) -> None:
        """Whether quota and bandwidth, as just set, may be so."""
        floor = domain.allocation.minimum
        # All that are plugged: an agent that does not hear the guest must count them all.
        cores = domain.vcpus * (1.0 if domain.quota is None else domain.quota)
        if domain.cap is not None:
            cores = min(cores, domain.cap)
        if cores < floor.cpu_cores - ROUNDING.cpu_cores:
            self.blame(name, f"got {cores:g} cores, its minimum is {floor.cpu_cores:g}")
        for what in ("disk_mib_s", "network_mib_s"):
            value = getattr(domain, what)
            if value is not None and value < floor[what] - ROUNDING[what]:
                self.blame(name, f"got {value:g} {what}, its minimum is {floor[what]:g}")

    def lift_limits(self) -> dict[str, str]:
        """Lift limits that swap does not back any more."""
        lifted = {}
        for name, domain in self.domains.items():
            if domain.limit_mib is not None and domain.held_mib > domain.limit_mib + self.swap_mib:
                domain.limit_mib = None
                lifted[name] = "swap is full"
        return lifted

    # --- guests --------------------------------------------------------------------------------------------------

    async def connect(self, path: str, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """In the place of `asyncio.open_unix_connection`."""
        await asyncio.sleep(self.latency())
        name = Path(path).name
        domain = self.domains.get(name)
        if domain is None or domain.state != "running":
            raise FileNotFoundError(path)
        reader = asyncio.StreamReader(limit=limit)

        def held_mib() -> float:
            return self.find(name).held_mib if name in self.domains else 0.0

        conversation = Conversation(
            domain.guest,
            domain.vcpus,
            lambda: domain.priority,
            held_mib,
            lambda what: self.blame(name, what),
            self.latency,
            reader,
        )
        domain.conversations = [c for c in domain.conversations if c.open] + [conversation]
        return reader, cast(Any, conversation)

    # --- what befalls a VM ---------------------------------------------------------------------------------------

    def fill(self, domain: Domain, mib: float) -> None:
        """The application takes memory: less than half of what can be spared, and not again within a minute, which is
        what a guest may do between a reading of it and what is taken by that reading."""
        domain.move(self.now())
        if self.now() - domain.grown_at < 60.0:
            return
        held = min(domain.balloon_mib, domain.balloon_wanted_mib) + min(domain.plugged_mib, domain.plugged_wanted_mib)
        domain.grown_at = self.now()
        domain.guest.cache_mib += max(min(mib, (held - domain.guest.needs_mib - 60.0) * 0.4), 0.0)

    def cure(self, name: str) -> None:
        """Nothing is wrong with the VM any more, but what was changed stays."""
        domain = self.domains[name]
        guest = domain.guest
        guest.manner = Manner.HONEST
        guest.pinned, guest.boast_mib, guest.pressed_at, guest.told_pressed_at = set(), 0.0, None, None
        guest.online -= guest.secret
        guest.secret = set()
        domain.speed_mib_s, domain.balloon_stuck_mib, domain.plugged_stuck_mib = 2000.0, 0.0, 0.0
        guest.cache_mib = min(guest.cache_mib, max(domain.held_mib - guest.used_mib - 60.0, 0.0))


def _in_blocks(before: float, after: float) -> float:
    """Whole blocks of virtio-mem only."""
    return (math.floor(after / 2) if after > before else math.ceil(after / 2)) * 2.0


def _toward(value: float, goal: float, step: float) -> float:
    return min(value + step, goal) if value < goal else max(value - step, goal)

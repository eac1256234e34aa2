"""The hypervisor port over a `tests.hostagent.local_world.LocalWorld`, for one agent; and that agent's end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

from ebbtide.deflation.allocations import cpu_shares
from ebbtide.deflation.cascade.mechanisms import Finding, Mechanism
from ebbtide.deflation.cascade.reconcile import cap_of, quota_of
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.hosts import TemplateInfo
from ebbtide.messages.vms import VMSpec
from ebbtide.rest.metrics.totals import Calls
from hostagent.control.reconciler import OWNERS_S
from hostagent.errors import DomainGone, HypervisorError, HypervisorTimeout, RequestRefused
from hostagent.libvirt.hypervisor import (
    Candidate,
    DomainState,
    DomainSummary,
    GuestCpus,
    HostSideReading,
    Saved,
    ToSave,
)
from hostagent.state.intents import Before, Intent, Phase
from tests.hostagent.fake_moves import NoMoves
from tests.hostagent.local_fence import KILLED as KILLED
from tests.hostagent.local_fence import Faults as Faults
from tests.hostagent.local_fence import Fence as Fence
from tests.hostagent.local_fence import FencedJournal as FencedJournal
from tests.hostagent.local_guest import Application, Guest
from tests.hostagent.local_world import Domain, LocalWorld

#: As in `hostagent.libvirt_connection` and `hostagent.libvirt.libvirt_hypervisor`.
CALL_LIMIT_S: Final = 15.0
LOOK_S: Final = 0.5
STALLED_S: Final = 4.0
TEMPLATE: Final = "lab"
NOT_HERE: Final = (Mechanism.CPU_UNPLUG, Mechanism.DIMM)


class LocalHypervisor:
    """See `hostagent.libvirt.hypervisor.Hypervisor`."""

    def __init__(self, world: LocalWorld, host_id: str, fence: Fence, faults: Faults) -> None:
        self._world = world
        self._host_id = host_id
        self._fence = fence
        self._faults = faults
        self.moves = NoMoves()
        self.calls = Calls()

    @property
    def sizes(self) -> LocalHypervisor:
        return self

    @property
    def adoption(self) -> LocalHypervisor:
        return self

    async def domains(self) -> list[DomainState]:
        await self._ask("domains")
        return [
            DomainState(name, domain.state, domain.intent)
            for name, domain in self._world.domains.items()
            if domain.intent.owner == self._host_id
        ]

    async def survey(self) -> dict[str, DomainSummary]:
        await self._ask("survey")
        found = {}
        for name in list(self._world.domains):
            domain = self._world.find(name)
            seconds = tuple(domain.vcpu_seconds)
            found[name] = DomainSummary(domain.uuid, domain.state, domain.vcpus, seconds, domain.held_mib)
        return found

    async def resident_mib(self, domains: Iterable[str]) -> dict[str, float]:
        return {}

    async def sweep(self, creating: Collection[str] = ()) -> None:
        await self._ask("sweep")

    async def keep(self, domain: str) -> None:
        self._fence.before()
        if (found := self._world.domains.get(domain)) is not None:
            found.kept = True
        self._fence.after()

    async def is_new(self, domain: str) -> bool:
        self._fence.before()
        found = self._world.domains.get(domain)
        return found is None or not found.kept

    async def check(self, spec: VMSpec) -> None:
        await asyncio.sleep(self._world.latency())
        if spec.template != TEMPLATE:
            raise RequestRefused(400, f"there is no template {spec.template}", "vm.template")

    async def create(self, domain: str, intent: Intent, xml: str | None = None) -> None:
        def make() -> None:
            if domain in self._world.domains:
                raise HypervisorError(f"domain {domain} exists already")
            made = self._world.domains[domain] = make_domain(intent, self._world.now())
            # Memory in use, so that floors matter.
            made.guest.cache_mib = (made.held_mib - 200.0) * self._world.random.choice((0.0, 0.3, 0.6))
            made.guest.application = self._world.random.choice(list(Application))

        await self._change("create", domain, make, CALL_LIMIT_S * 4)

    @property
    def can_create(self) -> bool:
        return True

    def templates(self) -> tuple[TemplateInfo, ...]:
        return (TemplateInfo(name=TEMPLATE),)

    async def start(self, domain: str, intent: Intent) -> None:
        def start() -> None:
            found = self._ours(domain)
            if found.state != "stopped":
                raise HypervisorError("Requested operation is not valid: domain is already running")
            if found.saved_mib is None:
                _define(found, intent, intent.redefine)
                found.start(self._world.now())
            found.saved_mib, found.moved_at = None, self._world.now()
            found.state = "paused"

        await self._change("start", domain, start, CALL_LIMIT_S * 4)

    async def redefine(self, domain: str, intent: Intent) -> None:
        await self._change("redefine", domain, lambda: _define(self._ours(domain), intent, True))

    async def shut_down(self, domain: str, limit_s: float) -> str:
        def shut_down() -> None:
            found = self._world.find(domain)
            self._judge_owner(domain, found)
            found.state = "stopped"
            found.hang_up()

        await self._change("shut_down", domain, shut_down, CALL_LIMIT_S * 4)
        return "its guest powered off"

    async def to_save(self, domain: str) -> ToSave:
        await self._ask("to_save")
        found = self._world.running(domain)
        return ToSave(min(found.guest.needs_mib, found.held_mib), found.held_mib, self._world.save_room_mib)

    async def save(self, domain: str, limit_s: float) -> Saved:
        def save() -> None:
            found = self._ours(domain)
            if found.saved_mib is None:
                found.saved_mib = min(self._world.running(domain).guest.needs_mib, found.held_mib)
            found.state = "stopped"
            found.hang_up()

        await self._change("save", domain, save, CALL_LIMIT_S * 4)
        return Saved(self._world.domains[domain].saved_mib or 0.0, 0.5)

    async def saved_mib(self, domain: str) -> float | None:
        await self._ask("saved_mib")
        found = self._world.domains.get(domain)
        return found.saved_mib if found is not None else None

    async def most(self, domain: str) -> ResourceVector:
        await self._ask("most")
        found = self._world.running(domain)
        return ResourceVector(cpu_cores=float(found.vcpus), memory_mib=found.boot_mib + found.device_mib)

    async def examine(self, domain: str) -> Candidate:
        raise HypervisorError("this world has no domains of others")

    async def take_over(self, domain: str, intent: Intent) -> None:
        raise HypervisorError("this world has no domains of others")

    async def give_back(self, domain: str, before: Before) -> None:
        raise HypervisorError("this world has no domains of others")

    async def resume(self, domain: str) -> None:
        def resume() -> None:
            self._ours(domain, live=True).state = "running"

        await self._change("resume", domain, resume)

    async def suspend(self, domain: str) -> None:
        def suspend() -> None:
            self._ours(domain, live=True).state = "paused"

        await self._change("suspend", domain, suspend)

    async def prepare_start(self, domain: str, size: ResourceVector) -> None:
        def prepare() -> None:
            found = self._ours(domain)
            found.starts_quota, found.starts_cap = (
                quota_of(size.cpu_cores, found.vcpus),
                cap_of(size.cpu_cores, found.vcpus),
            )
            found.starts_plugged_mib = max(math.floor((size.memory_mib - found.boot_mib) / 2) * 2.0, 0.0)

        await self._change("prepare_start", domain, prepare)

    async def findings(self, domain: str) -> tuple[Finding, ...]:
        await self._ask("findings")
        return tuple(Finding(mechanism, mechanism not in NOT_HERE, "as in this world") for mechanism in Mechanism)

    async def ask_statistics(self, domain: str, period_s: int) -> None:
        """No domain here has statistics to ask for."""

    async def guest_cpus(self, domain: str) -> GuestCpus | None:
        return None

    async def set_guest_cpus(self, domain: str, online: tuple[int, ...]) -> str:
        return "no domain here has a qemu-guest-agent"

    async def check_limits(self) -> dict[str, str]:
        return self._world.lift_limits()

    async def set_shares(self, domain: str, shares: int) -> None:
        def set_shares() -> None:
            self._ours(domain, live=True).shares = shares

        await self._change("set_shares", domain, set_shares)

    async def destroy(self, domain: str) -> None:
        def destroy() -> None:
            found = self._world.find(domain)
            given_up = found.given_up or found.intent.phase is Phase.CREATING
            if domain not in self._world.terminating and not given_up:
                self._world.blame(domain, "was removed, though nobody asked for that")
            self._judge_owner(domain, found)
            found.hang_up()
            del self._world.domains[domain]
            self._world.terminating.discard(domain)

        try:
            await self._change("destroy", domain, destroy, CALL_LIMIT_S * 4)
        except DomainGone:
            return

    async def write_intent(self, domain: str, intent: Intent) -> None:
        # As it comes back from the metadata.
        stored = Intent.model_validate_json(intent.model_dump_json())

        def write() -> None:
            self._ours(domain).intent = stored
            self._world.note(domain, f"{stored.phase}, committed {stored.committed}, target {stored.target}")

        await self._change("write_intent", domain, write)

    async def read(self, domain: str) -> HostSideReading:
        await self._ask("read")
        try:
            return self._world.running(domain).reading(self._world.now())
        except KeyError:
            raise DomainGone(f"no domain {domain}") from None

    async def cpu_seconds(self, domain: str) -> float:
        await self._ask("read")
        return sum(self._world.find(domain).vcpu_seconds)

    async def set_quota(self, domain: str, cores_per_cpu: float | None, cap_cores: float | None) -> None:
        def set_quota() -> None:
            found = self._ours(domain, live=True)
            found.quota = None if cores_per_cpu is None or cores_per_cpu >= 1 else max(cores_per_cpu, 0.001)
            found.cap = cap_cores
            self._world.note(domain, f"quota {found.quota}, on line {found.guest.online}")
            self._world.judge_limits(domain, found)

        await self._change("set_quota", domain, set_quota)

    async def set_vcpus(self, domain: str, count: int, limit_s: float) -> str:
        raise HypervisorError("this world has no ACPI unplug of vCPUs")

    async def set_disk(self, domain: str, disk_mib_s: float | None) -> str:
        def set_disk() -> None:
            found = self._ours(domain, live=True)
            found.disk_mib_s = disk_mib_s
            self._world.judge_limits(domain, found)

        await self._change("set_disk", domain, set_disk)
        return ""

    async def set_network(self, domain: str, network_mib_s: float | None) -> str:
        def set_network() -> None:
            found = self._ours(domain, live=True)
            found.network_mib_s = network_mib_s
            self._world.judge_limits(domain, found)

        await self._change("set_network", domain, set_network)
        return ""

    async def throttled(self, domain: str) -> tuple[int, int]:
        return 0, 0

    async def set_balloon(self, domain: str, balloon_mib: float, limit_s: float) -> str:
        await self._request_balloon(domain, balloon_mib)
        try:
            reason = await self._settled(domain, lambda d: d.balloon_mib, balloon_mib, "the balloon", limit_s)
        except asyncio.CancelledError:
            await self._request_balloon(domain, await self._size(domain, lambda d: d.balloon_mib), takes=False)
            raise
        if reason:
            await self._request_balloon(domain, await self._size(domain, lambda d: d.balloon_mib), takes=False)
        return reason

    async def set_plugged(self, domain: str, plugged_mib: float, limit_s: float) -> str:
        plugged_mib = math.floor(plugged_mib / 2 + 1e-6) * 2.0
        await self._request_plugged(domain, plugged_mib)
        try:
            reason = await self._settled(domain, lambda d: d.plugged_mib, plugged_mib, "virtio-mem", limit_s)
        except asyncio.CancelledError:
            await self._request_plugged(domain, await self._size(domain, lambda d: d.plugged_mib), takes=False)
            raise
        if reason:
            await self._request_plugged(domain, await self._size(domain, lambda d: d.plugged_mib), takes=False)
        return reason

    async def ask_plugged(self, domain: str, plugged_mib: float) -> None:
        await self._request_plugged(domain, plugged_mib)

    async def hold_back(self, domain: str) -> None:
        await self._request_plugged(domain, (await self.read(domain)).plugged_mib, takes=False)

    async def call_off(self, domain: str) -> None:
        found = await self.read(domain)
        await self._request_plugged(domain, found.plugged_mib)
        await self._request_balloon(domain, found.balloon_mib)

    async def set_limit(self, domain: str, limit_mib: float | None, limit_s: float) -> str:
        short = ""

        def set_limit() -> None:
            nonlocal short
            found = self._ours(domain, live=True)
            if limit_mib is not None and found.touchable_mib > limit_mib + self._world.swap_mib:
                short = f"swap does not back a limit of {limit_mib:g} MiB"
                return
            found.limit_mib = limit_mib
            self._world.judge(domain, found)

        await self._change("set_limit", domain, set_limit)
        return short

    async def guest_channel(self, domain: str) -> Path | None:
        await self._ask("guest_channel")
        found = self._world.domains.get(domain)
        if found is None or found.state != "running":
            raise HypervisorError("its domain is off")
        return Path("/guests") / domain

    def on_lifecycle(self, callback: Callable[[str, bool], None]) -> None:
        self._world.listeners[:] = [callback]

    async def close(self) -> None:
        pass

    # --- how calls go --------------------------------------------------------------------------------------------

    async def _request_balloon(self, domain: str, mib: float, takes: bool = True) -> None:
        def request() -> None:
            found = self._ours(domain, live=True)
            self._world.note(domain, f"balloon {found.balloon_mib:g}, wanted {found.balloon_wanted_mib:g} -> {mib:g}")
            if takes:
                self._world.judge_memory(domain, found, mib, found.plugged_wanted_mib)
            found.balloon_wanted_mib = min(mib, found.boot_mib)

        await self._change("set_balloon", domain, request)

    async def _request_plugged(self, domain: str, mib: float, takes: bool = True) -> None:
        """:param takes: not what only ends a request: the guest may have moved on meanwhile."""

        def request() -> None:
            found = self._ours(domain, live=True)
            self._world.note(domain, f"plugged {found.plugged_mib:g}, wanted {found.plugged_wanted_mib:g} -> {mib:g}")
            if takes:
                self._world.judge_memory(domain, found, found.balloon_wanted_mib, mib)
            if mib > found.device_mib + 1e-6 or mib % 2 > 1e-6:
                raise HypervisorError(f"virtio-mem cannot have {mib:g} of {found.device_mib:g} MiB")
            found.plugged_wanted_mib = mib

        await self._change("set_plugged", domain, request)

    async def _settled(
        self, domain: str, what: Callable[[Domain], float], goal_mib: float, device: str, limit_s: float
    ) -> str:
        began = moved_at = self._world.now()
        size = await self._size(domain, what)
        while abs(size - goal_mib) >= 0.5:
            now = self._world.now()
            if now - moved_at > STALLED_S:
                return f"{device} stopped at {size:g} MiB instead of {goal_mib:g}"
            if now - began > limit_s:
                return f"{device} was at {size:g} MiB instead of {goal_mib:g} when its time was up"
            await asyncio.sleep(LOOK_S)
            latest = await self._size(domain, what)
            if latest != size:
                size, moved_at = latest, self._world.now()
        return ""

    async def _size(self, domain: str, what: Callable[[Domain], float]) -> float:
        await self.read(domain)
        return what(self._world.running(domain)) if domain in self._world.domains else 0.0

    def _ours(self, name: str, live: bool = False) -> Domain:
        found = self._world.running(name) if live else self._world.find(name)
        self._judge_owner(name, found)
        return found

    def _judge_owner(self, name: str, found: Domain) -> None:
        """Whoever owns a domain is asked for now and then, not for every call."""
        if found.intent.owner != self._host_id and self._world.now() - found.taken_at > OWNERS_S + 30.0:
            self._world.blame(name, "was changed, though it belongs to somebody else")

    def _fail(self, method: str) -> None:
        self._fence.before()
        if self._world.now() < self._faults.down_until:
            raise HypervisorError("Failed to connect socket to '/var/run/libvirt/libvirt-sock': Connection refused")
        if self._faults.take(self._faults.refused, method):
            raise HypervisorError(f"internal error: {method} failed")

    async def _ask(self, method: str) -> None:
        await asyncio.sleep(self._world.latency())
        self._fail(method)
        await asyncio.sleep(self._world.latency())

    async def _change(
        self, method: str, domain: str, effect: Callable[[], None], limit_s: float = CALL_LIMIT_S
    ) -> None:
        await asyncio.sleep(self._world.latency())
        self._fail(method)
        late = self._faults.take(self._faults.late, method)
        lock = self._lock(domain)
        try:
            async with asyncio.timeout(limit_s):
                await lock.acquire()
        except TimeoutError:
            raise HypervisorTimeout(f"an earlier libvirt call has not returned within {limit_s:g} s") from None
        if late:
            self._world.afterwards(limit_s + 5.0, lambda: self._late(lock, domain, effect))
            if (found := self._world.domains.get(domain)) is not None:
                found.disturbed = True
                # What could not be started, as far as the agent knows, may be cleared away.
                found.given_up = found.given_up or found.intent.phase is Phase.CREATING
            await asyncio.sleep(limit_s)
            raise HypervisorTimeout(f"libvirt did not answer within {limit_s:g} s")
        try:
            try:
                effect()
            except KeyError:
                raise DomainGone(f"Domain not found: no domain with matching name '{domain}'") from None
            self._fence.after()
            await asyncio.sleep(self._world.latency())
        finally:
            lock.release()

    def _lock(self, domain: str) -> asyncio.Lock:
        found = self._world.domains.get(domain)
        return found.lock if found is not None else asyncio.Lock()

    def _late(self, lock: asyncio.Lock, domain: str, effect: Callable[[], None]) -> None:
        """The call returns at last, when nobody waits for it any more."""
        lock.release()
        try:
            effect()
        except (KeyError, HypervisorError):
            return
        if domain in self._world.domains:
            self._world.domains[domain].disturbed = True


def make_domain(intent: Intent, now: float) -> Domain:
    """A domain as the template would make it: vCPUs for the nominal size, a device with room up to the ceiling."""
    spec = intent.spec
    vcpus = math.ceil((spec.ceiling or spec.nominal).cpu_cores)
    most = spec.ceiling.memory_mib if spec.ceiling is not None else spec.nominal.memory_mib
    domain = Domain(intent, vcpus, intent.boot_mib, most - intent.boot_mib, Guest(set(range(vcpus))))
    domain.starts_plugged_mib = math.floor((intent.committed.memory_mib - intent.boot_mib) / 2) * 2.0
    domain.shares = cpu_shares(spec.priority, spec.nominal.cpu_cores)
    domain.start(now)
    domain.guest.boots_until = now + 2.0
    return domain


def _define(found: Domain, intent: Intent, anew: bool) -> None:
    """What a domain comes up with when it is started."""
    if anew:
        again = make_domain(intent, 0.0)
        found.vcpus, found.boot_mib, found.device_mib = again.vcpus, again.boot_mib, again.device_mib
    size = intent.committed
    quota = size.cpu_cores / found.vcpus
    found.starts_quota = quota if quota < 1 else None
    found.starts_plugged_mib = max(math.floor((size.memory_mib - found.boot_mib) / 2) * 2.0, 0.0)

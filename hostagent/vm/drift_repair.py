"""Repair of drift: compares one VM with its intent and puts right what differs.

What is to be put right, and when, is decided in `ebbtide.deflation.cascade.reconcile`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ebbtide.deflation.allocations import cpu_shares
from ebbtide.deflation.cascade.contention import Contention
from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.deflation.cascade.reconcile import (
    SLACK,
    Repair,
    RepairPace,
    Resize,
    SetDisk,
    SetNetwork,
    SetQuota,
    SetShares,
    Sight,
    held_below,
    held_beyond,
    repairs,
)
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.explanations import DecisionKind
from hostagent.clock import now as _now
from hostagent.libvirt.hypervisor import HostSideReading
from hostagent.vm.executor import ask_statistics, guest_status
from hostagent.vm.resizer import Resizer

#: Host-side CPU time that a parked vCPU may use between two looks, in seconds; more means that it runs.
PARKED_S = 0.05
#: A guest that has booted just now is still taking its memory.
YOUNG_S = 30.0
#: Time to bring a VM back to its committed size, in seconds.
REPAIR_DEADLINE_S = 30.0


class DriftRepair:
    """Keeps one VM as its intent says."""

    def __init__(self, resizer: Resizer) -> None:
        self._resizer = resizer
        #: Whether the VM is to be looked at closely as soon as possible.
        self.unsettled = True
        #: Host-side seconds of each parked vCPU at the last look, to see whether it runs.
        self._parked: dict[int, float] = {}
        self._parked_running: tuple[int, ...] = ()
        #: Of those, after which of its boot's words they began to run: a guest may have booted anew unseen, and only
        #: its next word tells whether one was broken.
        self._suspected: tuple[str, frozenset[int] | None, tuple[int, ...]] | None = None
        #: How often something had to be put right that was changed from outside, and when it may be tried again.
        self.drift_total = 0
        #: How often a vCPU began to run although the guest called it off line.
        self.broken_offline_total = 0
        #: Looks in a row at which its limits left the VM less CPU than its minimum.
        self._below_minimum = 0
        self.pace = RepairPace()
        #: Of limits alone, which do not wait behind what a guest does not give back.
        self._limits_pace = RepairPace()
        self.contention = Contention()
        #: Whether all was right after the last repair: what never was, nobody has undone.
        self._was_right = True
        #: Close looks so far.
        self.looks = 0
        #: Share of the quota's periods in which it stopped a vCPU, between the last two close looks; None: no quota.
        self.throttled_share: float | None = None
        self._throttled = (0, 0)

    def sample(self, vcpus: int, vcpu_seconds: Sequence[float]) -> None:
        """Take note of what can be seen of all VMs at once: whether a parked vCPU runs nevertheless."""
        link = self._resizer.link
        online = link.online if link.online is not None else frozenset(range(vcpus))
        earlier, self._parked = self._parked, parked_seconds(vcpu_seconds, online)
        running = tuple(cpu for cpu, seconds in self._parked.items() if seconds - earlier.get(cpu, seconds) > PARKED_S)
        if self._suspected is not None and link.online is not self._suspected[1]:
            (boot_id, _, suspected), self._suspected = self._suspected, None
            self._count_broken([cpu for cpu in suspected if boot_id == link.boot_id and cpu not in online])
        if running and not self._parked_running:
            self._suspected, self.unsettled = (link.boot_id, link.online, running), True
        self._parked_running = running

    def _count_broken(self, cpus: Sequence[int]) -> None:
        """Count that CPUs ran, if any, which the guest had called off line and still does."""
        if cpus:
            self.broken_offline_total += 1
            # Every doubling is told: a guest that breaks its word all the time is no reason to fill the history.
            if self.broken_offline_total.bit_count() == 1:
                which = ", ".join(map(str, cpus))
                self._note(
                    f"vCPU {which} runs though the guest calls it off line ({self.broken_offline_total} times so far); "
                    "what the VM has is held by its domain's cap",
                    kind=DecisionKind.DRIFT,
                )

    async def check(self, leave: str = "") -> tuple[Repair, ...]:
        """Compare what the VM has with what it should have, and put right what differs. Under the VM's lock.

        :param leave: why nothing is to be put right, but only written down; empty if it is to be.
        :returns: what was put right.
        :raises HypervisorError: the host's side cannot be read or set.
        """
        self.unsettled = False
        resizer, record = self._resizer, self._resizer.record
        if record.uncertain:
            await record.persist()
        status = await guest_status(resizer.link, brief=True)
        if status is not None:
            resizer.pressure.observe(status)
        reading = await resizer.host.hypervisor.sizes.read(resizer.domain)
        if not leave:
            await ask_statistics(resizer.host.hypervisor.sizes, resizer.domain, reading)
        resizer.ordinary.observe(reading.read_at, reading.statement, reading.qemu_agent)
        spec, committed = record.intent.spec, record.intent.committed.vector()
        online = len(status.cpus.online) if status is not None else await self._lacks_cpus(reading, committed.cpu_cores)
        nominal = spec.nominal.vector()
        await self._read_throttling(reading.quota_per_cpu is not None)
        sight = Sight(
            reading.bound(online, nominal),
            reading.vcpus,
            online is not None,
            len(resizer.link.online) if resizer.link.online is not None else None,
            reading.disk_mib_s,
            reading.network_mib_s,
            reading.cpu_shares,
            memory_known=not resizer.link.has_channel and resizer.ordinary.fresh,
            young=status is not None and (status.uptime_s < YOUNG_S or resizer.late.expected),
        )
        # Where the VMs hold more than there is, one that has more than was agreed is asked for it again.
        wanted = committed.smaller(record.intent.target.vector()) if resizer.host.is_overcommitted() else committed
        resizer.bound = sight.bound
        self._charge(committed, sight, bool(leave) or self.looks == 0)
        needed = repairs(wanted, nominal, sight, cpu_shares(spec.priority, spec.nominal.cpu_cores))
        now = _now()
        self.looks += 1
        self._watch_minimum(held_below(record.allocation().minimum.cpu_cores, sight))
        if all(isinstance(repair, Resize) for repair in needed):
            self._limits_pace.held()
        if not needed:
            self.pace.held()
            self.contention.looked(now)
            self._was_right = True
            if status is not None and not leave:
                await resizer.tell()
        elif leave:
            self.contention.looked(now)  # nobody undoes what is not put right
            self._note(f"{'; '.join(repair.why for repair in needed)}; left as it is: {leave}")
        elif due := tuple(repair for repair in needed if self._is_due(repair, now)):
            limits = any(not isinstance(repair, Resize) for repair in due)
            if self.pace.due(now):
                self.pace.tried(now)
            if limits:
                self._limits_pace.tried(now)
            fought = bool(self.contention.sentence)
            # Limits hold at once; a guest may not have come to its size.
            new = self._was_right or limits
            # CPUs that a guest keeps off line are no further change.
            self.drift_total += new or any(isinstance(repair, Resize) and repair.moves_memory for repair in due)
            if new:
                self.contention.repaired(now)
            else:
                self.contention.looked(now)
            if self.contention.sentence and not fought:
                self._note(self.contention.sentence)
            right, self._was_right = True, False
            for repair in due:
                self._note(repair.why)
                right = await self._put_right(repair, committed, wanted) and right
            self._was_right = right and due == needed
            return due
        return ()

    def _is_due(self, repair: Repair, now: float) -> bool:
        return self.pace.due(now) or (not isinstance(repair, Resize) and self._limits_pace.due(now))

    def _charge(self, committed: ResourceVector, sight: Sight, whole: bool) -> None:
        """Charge the VM with what it holds beyond its committed size."""
        record, bound = self._resizer.record, sight.bound.size
        before, record.beyond = record.beyond, held_beyond(committed, record.beyond, sight, whole)
        if before.is_zero() and not record.beyond.is_zero():
            self._note(
                f"it holds {bound.cpu_cores:g} cores and {bound.memory_mib:g} MiB, more than is committed: it is "
                "charged with that until it is taken, or measured again",
                kind=DecisionKind.DRIFT,
            )

    async def _lacks_cpus(self, reading: HostSideReading, cores: float) -> int | None:
        """How many CPUs a guest has on line that runs qemu-guest-agent only, where they were too few when it said so
        last; None: enough, or it does not answer. It is asked no more than that: it may take seconds."""
        link = self._resizer.link
        enough = link.online is None or len(link.online) >= min(math.ceil(cores - SLACK.cpu_cores), reading.vcpus)
        if link.has_channel or not reading.qemu_agent or enough:
            return None
        said = await self._resizer.host.hypervisor.sizes.guest_cpus(self._resizer.domain)
        if said is None:
            return None
        link.online = frozenset(said.online)
        return len(said.online)

    async def _read_throttling(self, there_is_one: bool) -> None:
        """How often the quota stops the VM: what it lacks cannot be seen from its size."""
        if not there_is_one:
            self.throttled_share, self._throttled = None, (0, 0)
            return
        before, self._throttled = (
            self._throttled,
            await self._resizer.host.hypervisor.sizes.throttled(self._resizer.domain),
        )
        periods, throttled = (now - earlier for now, earlier in zip(self._throttled, before, strict=True))
        if periods > 0 and throttled >= 0:
            self.throttled_share = round(throttled / periods, 3)

    async def _put_right(self, repair: Repair, committed: ResourceVector, wanted: ResourceVector) -> bool:
        """Whether all of it was."""
        failed, domain, sizes = "", self._resizer.domain, self._resizer.host.hypervisor.sizes
        match repair:
            case SetQuota():
                await sizes.set_quota(domain, repair.cores_per_cpu, repair.cap_cores)
                record = self._resizer.record
                record.beyond = record.beyond.with_component("cpu_cores", 0.0)
            case SetDisk():
                failed = await sizes.set_disk(domain, repair.disk_mib_s)
            case SetNetwork():
                failed = await sizes.set_network(domain, repair.network_mib_s)
            case SetShares():
                await sizes.set_shares(domain, repair.shares)
            case Resize():
                outcome = await self._resizer.reach(repair.target, REPAIR_DEADLINE_S, Mode.ASK)
                # What the guest does not give back is charged, whatever was agreed: only what is verified counts.
                await self._resizer.commit(outcome, committed, outcome.after.size.larger(wanted), "repair")
                return outcome.reached and repair.target.fits_in(outcome.after.size + SLACK)
        if failed:
            self._note(f"not put right: {failed}")
        return not failed

    def _watch_minimum(self, left: float | None) -> None:
        """An alarm where limits leave the VM less CPU than its minimum, by any program; once, and at its end.

        At the second look: what a repair between them puts right, or the guest's next word takes back, is none.
        """
        looks, self._below_minimum = self._below_minimum, self._below_minimum + 1 if left is not None else 0
        minimum = self._resizer.record.allocation().minimum.cpu_cores
        if left is not None and looks == 1:
            self._note(f"its limits leave it {left:g} cores; its minimum is {minimum:g}", kind=DecisionKind.ALARM)
        elif left is None and looks > 1:
            self._note(f"it has its CPU again; its minimum is {minimum:g}", kind=DecisionKind.ALARM)

    def _note(self, sentence: str, kind: DecisionKind = DecisionKind.REPAIR) -> None:
        intent = self._resizer.record.intent
        inputs = {"committed": intent.committed.vector().as_dict()}
        self._resizer.host.note(intent.spec.name, kind, sentence, inputs)


def parked_seconds(vcpu_seconds: Sequence[float], online: frozenset[int]) -> dict[int, float]:
    """The host-side CPU time of each vCPU that the guest calls off line: what one used before does not count."""
    return {cpu: seconds for cpu, seconds in enumerate(vcpu_seconds) if cpu not in online}

"""Looks at one VM and puts right what differs from its intent. What is to be put right, and when, is decided in
:mod:`deflation.reconcile`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deflation.allocations import cpu_shares
from deflation.instructions import Mode
from deflation.reconcile import Repair, RepairPace, Resize, SetDisk, SetNetwork, SetQuota, SetShares, Sight, repairs
from deflation.resources import ResourceVector
from hostagent.executor import guest_status

if TYPE_CHECKING:
    from hostagent.vms import ManagedVM

#: Host-side CPU time that a parked vCPU may use between two looks, in seconds; more means that it runs.
PARKED_S = 0.05
#: A guest that has booted just now is still taking its memory.
YOUNG_S = 30.0
#: Time to bring a VM back to its committed size, in seconds.
REPAIR_DEADLINE_S = 30.0


class Upkeep:
    """Keeps one VM as it should be."""

    def __init__(self, vm: ManagedVM) -> None:
        self._vm = vm
        #: Whether the VM is to be looked at closely as soon as possible.
        self.unsettled = True
        #: CPUs on line at the guest's last word; None: not known.
        self.online: frozenset[int] | None = None
        #: Host-side seconds of each parked vCPU at the last look, to see whether it runs.
        self._parked: dict[int, float] = {}
        self._parked_running: tuple[int, ...] = ()
        #: How often something had to be put right that somebody else had changed, and when it may be tried again.
        self.drift_total = 0
        self.pace = RepairPace()
        #: Share of the quota's periods in which it stopped a vCPU, between the last two close looks; None: no quota.
        self.throttled_share: float | None = None
        self._throttled = (0, 0)

    def glance(self, vcpus: int, vcpu_seconds: Sequence[float]) -> None:
        """Take note of what can be seen of all VMs at once: whether a parked vCPU runs nevertheless."""
        online = self.online if self.online is not None else frozenset(range(vcpus))
        earlier, self._parked = self._parked, parked_seconds(vcpu_seconds, online)
        running = tuple(cpu for cpu, seconds in self._parked.items() if seconds - earlier.get(cpu, seconds) > PARKED_S)
        if running != self._parked_running and running:
            self.unsettled = True
        self._parked_running = running or tuple(cpu for cpu in self._parked_running if cpu in self._parked)

    async def look(self, leave: str = "") -> tuple[Repair, ...]:
        """Compare what the VM has with what it should have, and put right what differs. Under the VM's lock.

        :param leave: why nothing is to be put right, but only written down; empty if it is to be.
        :returns: what was put right.
        :raises HypervisorError: the host's side cannot be read or set.
        """
        self.unsettled = False
        if self._vm.uncertain:
            await self._vm.persist()
        status = await guest_status(self._vm.link, brief=True)
        if status is not None:
            self._vm.pressure.observe(status)
        reading = await self._vm.hypervisor.read(self._vm.domain)
        nominal, committed = self._vm.intent.spec.nominal.vector(), self._vm.intent.committed.vector()
        self.online = frozenset(status.cpus.online) if status is not None else None
        await self._look_at_quota(reading.quota_per_cpu is not None)
        sight = Sight(
            reading.bound(len(status.cpus.online) if status is not None else None, nominal),
            reading.vcpus,
            status is not None,
            self._parked_running,
            reading.disk_mib_s,
            reading.network_mib_s,
            reading.cpu_shares,
            young=status is not None and status.uptime_s < YOUNG_S,
        )
        spec = self._vm.intent.spec
        # Where the VMs hold more than there is, one that has more than was agreed is asked for it again.
        wanted = committed.smaller(self._vm.intent.target.vector()) if self._vm.crowded() else committed
        needed = repairs(wanted, nominal, sight, cpu_shares(spec.priority, spec.nominal.cpu_cores))
        now = _now()
        if not needed:
            self.pace.held()
        elif leave:
            sentence = f"{'; '.join(repair.why for repair in needed)}; left as it is: {leave}"
            self._vm.note(self._vm.name, "repair", sentence, {"committed": committed.as_dict()})
        elif self.pace.due(now):
            self.pace.tried(now)
            self.drift_total += 1
            for repair in needed:
                self._vm.note(self._vm.name, "repair", repair.why, {"committed": committed.as_dict()})
                await self._put_right(repair, committed, wanted)
            return needed
        return ()

    async def _look_at_quota(self, there_is_one: bool) -> None:
        """How often the quota stops the VM: what it lacks cannot be seen from its size."""
        if not there_is_one:
            self.throttled_share, self._throttled = None, (0, 0)
            return
        before, self._throttled = self._throttled, await self._vm.hypervisor.throttled(self._vm.domain)
        periods, throttled = (now - earlier for now, earlier in zip(self._throttled, before, strict=True))
        if periods > 0 and throttled >= 0:
            self.throttled_share = round(throttled / periods, 3)

    async def _put_right(self, repair: Repair, committed: ResourceVector, wanted: ResourceVector) -> None:
        failed = ""
        match repair:
            case SetQuota():
                await self._vm.hypervisor.set_quota(self._vm.domain, repair.cores_per_cpu)
            case SetDisk():
                failed = await self._vm.hypervisor.set_disk(self._vm.domain, repair.disk_mib_s)
            case SetNetwork():
                failed = await self._vm.hypervisor.set_network(self._vm.domain, repair.network_mib_s)
            case SetShares():
                await self._vm.hypervisor.set_shares(self._vm.domain, repair.shares)
            case Resize():
                outcome = await self._vm.reach(repair.target, REPAIR_DEADLINE_S, Mode.ASK)
                # What the guest does not give back is charged, whatever was agreed: only what is verified counts.
                await self._vm.commit(outcome, committed, outcome.after.size.larger(wanted), "repair")
        if failed:
            self._vm.note(self._vm.name, "repair", f"not put right: {failed}", {"committed": committed.as_dict()})


def parked_seconds(vcpu_seconds: Sequence[float], online: frozenset[int]) -> dict[int, float]:
    """The host-side CPU time of each vCPU that the guest calls off line: what one used before does not count."""
    return {cpu: seconds for cpu, seconds in enumerate(vcpu_seconds) if cpu not in online}


def _now() -> float:
    return asyncio.get_running_loop().time()

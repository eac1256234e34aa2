"""The lane of CPU and of the bandwidths: off-lining in the guest, then limits from outside."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import Instruction, ReadGuest, Throttle, Unplug
from ebbtide.deflation.cascade.lanes import Job, Lane, ResourceLane
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.cascade.steps import cpus_to_keep, cpus_wanted
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import TOLERANCE, ResourceVector

#: With less time than this, in seconds, limits from outside come first and the guest follows. With more they come once
#: memory has left the guest's layer: a guest that is throttled gives its memory more slowly.
SHORT_DEADLINE_S: Final = 10.0
#: A quota is set in microseconds.
ROUNDING_CORES: Final = 0.005


class CpuLane(ResourceLane):
    """See the module. `step` says what is to be done next; None: it waits, or is ``done``."""

    lane = Lane.CPU

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._begun = False
        self._is_read = False
        #: CPUs that did not go off line although they were asked to: they are not asked again.
        self._refused = False
        #: CPUs went off line, and the quota has not been looked at since.
        self._taken_off = False
        #: Over how many CPUs a quota was spread at once; None: it was not.
        self._spread: int | None = None
        self._limited = False

    def at_once(self, now: float) -> Instruction | None:
        """The limits of a short deadline, before anybody is asked.

        The quota is spread over the CPUs that are to stay, so that the VM has its target also when the others are off;
        until then the domain's cap holds it.
        """
        if not (self._is_short and self._is_needed):
            return None
        self._enter(Layer.HYPERVISOR, now)
        online, mechanisms = self.job.bound.cpus_online, self.job.mechanisms
        offlines = mechanisms.has(Mechanism.CPU_OFFLINE) and self.job.time_left(Layer.GUEST, now) > 0
        stay = cpus_wanted(self.job.target.cpu_cores) if offlines else online
        limits = self._limits(now, min(stay, online))
        self._spread = limits.cpus_online if limits is not None and limits.cpu_cores is not None else None
        return limits

    def step(self, now: float, memory_unplugs: bool) -> Instruction | None:
        """The next instruction, if there is one now.

        :param memory_unplugs: whether memory is still in the guest's layer.
        """
        if not self._begun:
            self._begun = True
            self._begin(now)
        if self.layer is Layer.GUEST:
            if (instruction := self._in_the_guest(now)) is not None:
                return instruction
            self._leave(now)
        if self.done or (memory_unplugs and not self._is_short):
            return None
        if not self._limited:
            self._limited = True
            self._enter(Layer.HYPERVISOR, now)
            if (limits := self._limits(now)) is not None:
                return limits
        self._end(now)
        return None

    def judge(self, taking: Instruction, reason: str) -> None:
        """See by the latest reading whether CPUs went off line.

        :param reason: why not, as far as the guest has said.
        """
        if not isinstance(taking, Unplug) or taking.online is None:
            return
        self._taken_off = True
        if self.guest is None or len(self.guest.online) <= len(taking.online):
            return
        self._refused = True
        if not reason:
            kept = ", ".join(str(cpu) for cpu in sorted(set(self.guest.online) - set(taking.online)))
            self.job.accounts[Layer.GUEST].say(f"CPU {kept} is on line after it was to go off: the quota takes over")

    @property
    def _is_short(self) -> bool:
        return self.job.deadline_s < SHORT_DEADLINE_S

    @property
    def _falls(self) -> bool:
        return self.job.before.cpu_cores > self.job.target.cpu_cores + TOLERANCE

    @property
    def _is_needed(self) -> bool:
        need = self.job.need
        return self._falls or need.disk_mib_s > TOLERANCE or need.network_mib_s > TOLERANCE

    def _begin(self, now: float) -> None:
        if self._spread is None and not self._is_needed:
            self._end(now)
            return
        if not (self._enter_the_guest(now, self.job.before.size.less(self.job.target)) and self._falls):
            self._leave(now)

    def _in_the_guest(self, now: float) -> Instruction | None:
        left = self.job.time_left(Layer.GUEST, now)
        if not self._is_read:
            self._is_read = True
            return ReadGuest(0, left, cpus=True) if left > 0 else None
        if self._has_less_than_its_target():
            return Throttle(0, max(left, 1.0), self.job.target.cpu_cores, None)
        if why := self._why_nothing_of_the_guest(now):
            self._account.say(why)
            return None
        assert self.guest is not None
        bound, target = self._bound_without_our_limits(), self.job.target.cpu_cores
        if self._refused or not self.job.usable(Mechanism.CPU_OFFLINE, bound.cpu_cores - target):
            return None
        online = cpus_to_keep(bound, self.guest, target)
        if online is None:
            return None
        self._account.promise(ResourceVector(cpu_cores=max(bound.cpu_cores - len(online), 0.0)))
        return Unplug(0, left, online, None, unplug_vcpus=self.job.mechanisms.has(Mechanism.CPU_UNPLUG))

    def _has_less_than_its_target(self) -> bool:
        """A quota from an earlier deflation counts for each CPU on line, so that with fewer of them the VM has less
        than its target: the target is spread over those that are left, before memory takes its time."""
        taken_off, self._taken_off = self._taken_off, False
        wanted = min(self.job.target.cpu_cores, float(self.job.bound.cpus_online))
        usable = taken_off and self.job.mechanisms.has(Mechanism.QUOTA)
        return usable and self.job.bound.cpu_cores < wanted - TOLERANCE

    def _bound_without_our_limits(self) -> Bound:
        """With a quota that was set at once nothing is missing any more; the CPUs go off line all the same."""
        if self._spread is None:
            return self.job.bound
        before = self.job.before
        return replace(self.job.bound, quota_per_cpu=before.quota_per_cpu, cap_cores=before.cap_cores)

    def _limits(self, now: float, spread: int | None = None) -> Throttle | None:
        """Quota and bandwidth, always, since they also enforce what the guest only promised; None: there are none."""
        job, need = self.job, self.job.need
        cpu = disk = network = None
        if not job.mechanisms.has(Mechanism.QUOTA):
            if need.cpu_cores > TOLERANCE:
                self._account.say(job.mechanisms.reason(Mechanism.QUOTA))
        elif self._falls and not self._is_spread:
            cpu = job.target.cpu_cores
        if job.usable(Mechanism.DISK, need.disk_mib_s):
            disk = job.target.disk_mib_s
        if job.usable(Mechanism.NETWORK, need.network_mib_s):
            network = job.target.network_mib_s
        if (cpu, disk, network) == (None, None, None):
            return None
        self._account.promise(
            ResourceVector(
                cpu_cores=need.cpu_cores if cpu is not None else 0.0,
                disk_mib_s=need.disk_mib_s if disk is not None else 0.0,
                network_mib_s=need.network_mib_s if network is not None else 0.0,
            )
        )
        limit_s = max(job.time_left(Layer.HYPERVISOR, now), 1.0)
        return Throttle(0, limit_s, cpu, None, disk, network, cpus_online=spread if cpu is not None else None)

    @property
    def _is_spread(self) -> bool:
        """Whether the quota that was set at once is the right one for the CPUs that are on line now."""
        bound = self.job.bound
        return bound.cpus_online == self._spread and bound.cpu_cores <= self.job.target.cpu_cores + ROUNDING_CORES

"""Comparison of what a VM really has with what it should have: which repairs bring the two together.

Level-triggered: every look compares all that libvirt, the cgroups and the guest say with the committed size, whatever
was or was not heard of before (a service manager's reload resets limits, a reset puts CPUs back, people use virsh).
Accounting as in docs/internals/contracts.md: an off-lined CPU is a promise of the guest, so the cap that holds a VM to
its size is on the whole domain. What the guest says of its CPUs decides only how the size is spread among them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ebbtide.deflation.bounds import EMULATOR_SHARE, Bound
from ebbtide.deflation.resources import ResourceVector

#: What may differ without anything being wrong: quotas and balloons are set in steps, virtio-mem moves in blocks.
SLACK: Final = ResourceVector(cpu_cores=0.005, memory_mib=2.0, disk_mib_s=0.5, network_mib_s=0.5)
#: A repair that did not hold is tried again after this, and ever later, in seconds.
FIRST_PAUSE_S: Final = 4.0
LONGEST_PAUSE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at a VM, from outside and inside."""

    bound: Bound
    #: vCPUs plugged, on line or not.
    vcpus: int
    #: Whether the guest has said just now which of them are on line; else the bound counts all.
    online_known: bool = True
    #: How many were on line by the guest's last word, however old: a guest that falls silent has not put them on line.
    #: None: it never said.
    online: int | None = None
    #: Bandwidth limits as read back, MiB/s; None where there is none.
    disk_mib_s: float | None = None
    network_mib_s: float | None = None
    #: CPU shares as read back; None where the host does not say.
    cpu_shares: int | None = None
    #: Whether the guest has booted just now: it is still taking the memory that it was given.
    young: bool = False
    #: Whether a guest without our agent has said just now, by its balloon driver, what of its memory it uses.
    memory_known: bool = False


@dataclass(frozen=True, slots=True)
class Repair:
    """One thing to put right, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class SetQuota(Repair):
    """Limit each vCPU thread and the whole domain to this many cores; None lifts the limit."""

    cores_per_cpu: float | None
    cap_cores: float | None


@dataclass(frozen=True, slots=True)
class SetDisk(Repair):
    """Limit the disks to this, MiB/s."""

    disk_mib_s: float


@dataclass(frozen=True, slots=True)
class SetNetwork(Repair):
    """Limit the interfaces to this, MiB/s."""

    network_mib_s: float


@dataclass(frozen=True, slots=True)
class SetShares(Repair):
    """Weigh the VM's CPU time by this."""

    shares: int


@dataclass(frozen=True, slots=True)
class Resize(Repair):
    """Bring CPU and memory to this size, by the cascade or its reverse."""

    target: ResourceVector
    #: Whether its memory is not as it should be; else only CPUs are off line.
    moves_memory: bool = True


def quota_of(cores: float, cpus: int) -> float | None:
    """The quota of one vCPU for a size spread over this many of them; None where no limit is needed."""
    share = cores / max(cpus, 1)
    return share if share < 1.0 - SLACK.cpu_cores / max(cpus, 1) else None


def cap_of(cores: float, vcpus: int) -> float | None:
    """The cap of a whole domain for a size, whichever of its vCPUs run; None where all of them may run fully."""
    return cores * (1 + EMULATOR_SHARE) if cores < vcpus - SLACK.cpu_cores else None


def spread_of(online: int, cores: float, bound: Bound, may_be_parked: bool) -> int:
    """Over how many vCPUs the quota of a silent guest's VM is spread: those that were on line by its last word.

    Where nobody heard one, as after a restart of the agent, one: any that are off line cost the VM nothing then, and
    the domain's cap holds it, but only where that is in force already.

    :param online: how many were on line; 0: it never said.
    :param bound: as it was read last; all vCPUs count as on line.
    :param may_be_parked: whether there is somebody in the guest who takes CPUs off line for us.
    """
    if online:
        return min(online, bound.vcpus) or bound.cpus_online
    wanted, cap = cap_of(cores, bound.vcpus), bound.cap_cores
    is_capped = wanted is not None and cap is not None and cap <= wanted + SLACK.cpu_cores
    return 1 if may_be_parked and is_capped else bound.cpus_online


def held_below(minimum_cores: float, sight: Sight) -> float | None:
    """What limits leave a VM where that is less than its minimum: an alarm, whichever program set them; None: no."""
    cpus = sight.online or sight.vcpus
    left = replace(sight.bound, cpus_online=cpus).cpu_cores
    # CPUs that the guest has taken off line itself are its own affair.
    return left if left < min(minimum_cores, float(cpus)) - SLACK.cpu_cores else None


def held_beyond(committed: ResourceVector, before: ResourceVector, sight: Sight, whole: bool = False) -> ResourceVector:
    """What a VM is charged with that it holds beyond its committed size, as one may that was started past us.

    From a silent guest no memory is taken; once it speaks, what it was charged with stays until that is taken or gone.

    :param before: what it was charged with until now.
    :param whole: all of it, since nothing is taken, or it is not known what it was charged with.
    """
    bound = sight.bound.size
    held = {name: bound[name] for name in ("cpu_cores", "memory_mib") if bound[name] > committed[name] + SLACK[name]}
    found = ResourceVector(**held)
    return found.smaller(before) if (sight.online_known or sight.memory_known) and not whole else found


def lacks_memory(bound: Bound, memory_mib: float) -> bool:
    """Whether a VM has less than that; where memory comes in whole DIMMs, less than one may be missing."""
    return bound.memory_mib < memory_mib - max(SLACK.memory_mib, min(bound.dimms_mib, default=0.0) - 1.0)


def repairs(
    committed: ResourceVector, nominal: ResourceVector, sight: Sight, shares: int | None = None
) -> tuple[Repair, ...]:
    """What is to be done so that a VM has its committed size again; empty if it has.

    Limits come first: they hold at once. Memory that is missing is given back as well as surplus is taken.

    :param nominal: what the VM was sold: disk and network count only where they are declared.
    :param shares: the CPU shares that it should have; None: whatever it has.
    """
    found: list[Repair] = []
    bound = sight.bound
    cap, wanted = cap_of(committed.cpu_cores, sight.vcpus), _quota_wanted(committed.cpu_cores, sight)
    spread = bound.cpus_online if sight.online_known else sight.online or 1
    if abs(_share(bound.quota_per_cpu) - _share(wanted)) * spread > SLACK.cpu_cores:
        found.append(SetQuota(_why_quota(sight, wanted), wanted, cap))
    elif (bound.cap_cores is None) != (cap is None) or abs((bound.cap_cores or 0) - (cap or 0)) > SLACK.cpu_cores:
        found.append(SetQuota(_why_cap(bound.cap_cores, cap), wanted, cap))
    if shares is not None and sight.cpu_shares not in (None, shares):
        found.append(SetShares(f"the VM has {sight.cpu_shares} CPU shares instead of {shares}", shares))
    for component, limit, repair in (
        ("disk_mib_s", sight.disk_mib_s, SetDisk),
        ("network_mib_s", sight.network_mib_s, SetNetwork),
    ):
        if nominal[component] > 0 and (limit is None or abs(limit - committed[component]) > SLACK[component]):
            has = "no limit" if limit is None else f"a limit of {limit:g}"
            found.append(repair(f"{component} has {has} instead of {committed[component]:g}", committed[component]))
    surplus = bound.memory_mib > committed.memory_mib + SLACK.memory_mib
    lacks_cpus = bound.cpus_online < committed.cpu_cores - SLACK.cpu_cores
    lacks = lacks_memory(bound, committed.memory_mib)
    # Neither is done without the guest's word: memory is not taken from one that is silent (rule 5).
    if (sight.online_known or sight.memory_known) and (surplus or ((lacks or lacks_cpus) and not sight.young)):
        found.append(
            Resize(
                f"the VM has {bound.cpus_online} CPUs on line and {bound.memory_mib:g} MiB; "
                f"committed are {committed.cpu_cores:g} cores and {committed.memory_mib:g} MiB",
                committed,
                moves_memory=surplus or lacks,
            )
        )
    return tuple(found)


def _share(quota: float | None) -> float:
    return 1.0 if quota is None else min(quota, 1.0)


def _quota_wanted(cores: float, sight: Sight) -> float | None:
    """The quota of one vCPU. Where the guest never said which are on line, any that leaves it its size will do."""
    present = sight.bound.quota_per_cpu
    if sight.online_known:
        return quota_of(cores, sight.bound.cpus_online)
    if sight.online is not None:
        return quota_of(cores, min(sight.online, sight.vcpus))
    enough = _share(present) * sight.vcpus >= min(cores, sight.vcpus) - SLACK.cpu_cores
    return present if enough and _share(present) < 1 else quota_of(cores, 1)


def _why_quota(sight: Sight, wanted: float | None) -> str:
    has = "no quota" if sight.bound.quota_per_cpu is None else f"a quota of {sight.bound.quota_per_cpu:.3g} cores"
    goal = "none" if wanted is None else f"{wanted:.3g}"
    unknown = "" if sight.online_known else ", by what the guest, silent now, said last of its CPUs"
    return f"each vCPU has {has} instead of {goal}{unknown}"


def _why_cap(present: float | None, wanted: float | None) -> str:
    has, goal = ("none" if cap is None else f"{cap:.3g} cores" for cap in (present, wanted))
    return f"the domain has a cap of {has} instead of {goal}"


@dataclass(slots=True)
class RepairPace:
    """When a repair may be tried again: one that does not hold is tried ever more rarely."""

    not_before: float = 0.0
    pause_s: float = FIRST_PAUSE_S

    def due(self, now: float) -> bool:
        return now >= self.not_before

    def tried(self, now: float) -> None:
        """A repair was made at ``now``: the next one after a pause, which doubles."""
        self.not_before = now + self.pause_s
        self.pause_s = min(self.pause_s * 2, LONGEST_PAUSE_S)

    def at_once(self) -> None:
        """There is reason to try now; if that does not hold either, the pause after it is as it would have been."""
        self.not_before = 0.0

    def held(self) -> None:
        """A look found nothing to repair."""
        self.not_before, self.pause_s = 0.0, FIRST_PAUSE_S

"""What must hold after every fault, whatever it was: the rules that never bend, over two pictures of a host.

Pictures of real guests are taken past the agent (`tests.faults.ward`), those of the make-believe host are read
off it; the rules are the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.vms import VMStatus

#: Quotas are set in whole microseconds, balloons in pages, virtio-mem in blocks of 2 MiB.
SLACK = ResourceVector(cpu_cores=0.011, memory_mib=2.0, disk_mib_s=0.1, network_mib_s=0.1)
#: What a guest must still call available, MiB: less, and its kernel is about to kill something.
LEAST_AVAILABLE_MIB = 24.0


@dataclass(frozen=True)
class Seen:
    """One VM: what its agent says of it, and what it has by readings that do not go through the agent."""

    status: VMStatus
    #: What the host lets it hold: min(CPUs on line, their quotas), balloon + virtio-mem.
    held: ResourceVector
    #: The process that runs it; another one after a restart.
    process: int
    #: What is asked of the guest and not reached, MiB.
    pending_mib: float
    #: MemAvailable in the guest, MiB.
    available_mib: float
    #: Processes that the guest's own kernel has killed for want of memory, since it booted.
    oom_kills: int
    boot_id: str


@dataclass(frozen=True)
class Picture:
    """A host at one moment."""

    capacity: ResourceVector
    vms: dict[str, Seen]


def broken(
    before: Picture, after: Picture, restarted: Collection[str] = (), gone: Collection[str] = (), exact: bool = True
) -> list[str]:
    """Which rules are broken, in words; none, if all is well.

    :param restarted: VMs that the fault itself has restarted: their process and their boot may be others.
    :param gone: VMs that the fault itself has removed.
    :param exact: whether the agent's figures must equal the readings; otherwise they must only not be below them.
    """
    found = []
    for name, was in before.vms.items():
        if name not in after.vms:
            if name not in gone:
                found.append(f"{name} is gone")
            continue
        found += [f"{name} {problem}" for problem in _of_one(was, after.vms[name], name in restarted, exact)]
    for what, sizes in (
        ("the sizes that the agent committed", [vm.status.current.vector() for vm in after.vms.values()]),
        ("the sizes that the VMs hold", [vm.held for vm in after.vms.values()]),
    ):
        overhead = ResourceVector(memory_mib=sum(vm.status.overhead_mib for vm in after.vms.values()))
        total = sum(sizes, overhead)
        if not total.fits_in(after.capacity + SLACK):
            found.append(f"{what} come to {total}, which exceeds the capacity ({after.capacity})")
    return found


def not_nominal(picture: Picture) -> list[str]:
    """Which VMs do not have all of their nominal size, in words."""
    return [
        f"{name} has {seen.held}, and nominal is {seen.status.nominal.vector()}"
        for name, seen in picture.vms.items()
        if not seen.status.nominal.vector().fits_in(seen.held + SLACK)
    ]


def _of_one(was: Seen, now: Seen, restarted: bool, exact: bool) -> list[str]:
    problems = []
    committed, held = now.status.current.vector(), now.held
    if not restarted and now.process != was.process:
        problems.append(f"was killed: process {was.process} is now {now.process}")
    if not restarted and now.boot_id != was.boot_id:
        problems.append("has rebooted")
    if now.boot_id == was.boot_id and now.oom_kills > was.oom_kills:
        problems.append(f"ran out of memory: its kernel killed {now.oom_kills - was.oom_kills}")
    if now.available_mib < LEAST_AVAILABLE_MIB:
        problems.append(f"has only {now.available_mib:.0f} MiB left")
    if now.status.priority.value == "fixed" and not was.held.fits_in(held + SLACK):
        problems.append(f"is fixed and was touched: it had {was.held} and has {held}")
    minimum = now.status.minimum.vector()
    if not minimum.fits_in(held + SLACK):
        problems.append(f"is below its minimum ({minimum}): it holds {held}")
    if not held.fits_in(committed + SLACK):
        problems.append(f"holds {held}, more than the agent counts ({committed})")
    if exact and not committed.fits_in(held + SLACK):
        problems.append(f"holds {held}, less than the agent says ({committed})")
    if now.status.state.value != "running":
        problems.append(f"is {now.status.state.value}: something is still pending")
    if now.pending_mib > SLACK.memory_mib:
        problems.append(f"is still asked for {now.pending_mib:g} MiB")
    return problems

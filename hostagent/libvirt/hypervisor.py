"""Port between the agent and a hypervisor; `hostagent.libvirt.libvirt_hypervisor` implements it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.mechanisms import Finding
from ebbtide.deflation.cascade.ordinary import Statement
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.hosts import TemplateInfo
from ebbtide.messages.migrations import MigrationAddress
from ebbtide.messages.vms import VMSpec
from ebbtide.rest.metrics.totals import Calls
from hostagent.state.intents import Before, Intent


def domain_name(host_id: str, vm: str) -> str:
    """The libvirt name of a VM. No host's names begin like another's, since a name of ours has no dot."""
    return f"ebb-{host_id}.{vm}"


@dataclass(frozen=True, slots=True)
class HostSideReading:
    """What can be seen of a domain from outside, in one pass."""

    #: vCPUs plugged into the domain, on line or not.
    vcpus: int
    #: Quota of one vCPU in cores; None where there is no limit.
    quota_per_cpu: float | None
    #: Boot memory less what the balloon holds, MiB.
    balloon_mib: float
    #: virtio-mem ``<current>`` and DIMMs, MiB.
    plugged_mib: float
    #: Bandwidth limits as read back, MiB/s; None where there is no limit.
    disk_mib_s: float | None = None
    network_mib_s: float | None = None
    #: Limit on the guest's memory (less the emulator's own), MiB; None where there is none.
    limit_mib: float | None = None
    #: Weight of the domain's CPU time; None where the host does not say.
    cpu_shares: int | None = None
    #: Of what is plugged, the DIMMs that can be taken, MiB each.
    dimms_mib: tuple[float, ...] = ()
    #: Memory that the guest's kernel calls available, through its balloon driver; None where it has not said so lately.
    usable_mib: float | None = None
    #: When it said so; whatever clock, it moves on with each statement.
    usable_at: float = 0.0
    #: Cap of the whole domain's CPU time in cores; None where there is none.
    cap_cores: float | None = None
    #: What its balloon driver said last, however long ago; None: nothing.
    statement: Statement | None = None
    #: When this was read, seconds since the epoch.
    read_at: float = 0.0
    #: How often the balloon driver is asked, seconds, 0: never; None: there is none.
    stats_period_s: int | None = None
    #: Whether a qemu-guest-agent has opened its channel.
    qemu_agent: bool = False
    #: Whether what is plugged is told up to a second late.
    plugged_lags: bool = False
    #: Of what is plugged, DIMMs that could not be given back and so are not taken, MiB.
    fixed_mib: float = 0.0

    def bound(self, cpus_online: int | None, declared: ResourceVector = ZERO) -> Bound:
        """The bound, given what the guest says is on line; unknown counts as all that are plugged.

        :param declared: what the VM was sold: disk and network count only where they are declared, and without a limit
            in full.
        """
        online = self.vcpus if cpus_online is None else min(cpus_online, self.vcpus)
        return Bound(
            online,
            self.quota_per_cpu,
            self.balloon_mib,
            self.plugged_mib,
            _limited(self.disk_mib_s, declared.disk_mib_s),
            _limited(self.network_mib_s, declared.network_mib_s),
            self.limit_mib,
            self.dimms_mib,
            self.cap_cores,
            self.vcpus,
            self.fixed_mib,
        )


def _limited(limit: float | None, declared: float) -> float:
    if declared <= 0:
        return 0.0
    return declared if limit is None else limit


@dataclass(frozen=True, slots=True)
class GuestCpus:
    """What a qemu-guest-agent said of its guest's CPUs, by number. Untrusted."""

    online: tuple[int, ...]
    #: Those that may be taken off line, in the order in which to take them.
    offlinable: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DomainState:
    """One of our domains as found on the host."""

    name: str
    #: "running", "paused" or "stopped".
    state: str
    intent: Intent
    #: Whether its guest is emulated, whatever new VMs of this host run under.
    emulated: bool = False
    #: Whether it goes on where it was saved, started by another program.
    goes_on: bool = False
    #: Whether its intent was written into this very domain; False: into one of another UUID; None: it does not say.
    original: bool | None = None
    #: Whether its owner has had it back, so that its intent is of before, as after a revert to a snapshot.
    released: bool = False


@dataclass(frozen=True, slots=True)
class DomainSummary:
    """What one call says of a domain among all."""

    #: Differs when a domain was removed and another one made under its name.
    uuid: str
    #: "running", "paused" or "stopped".
    state: str
    #: vCPUs plugged, and the host-side CPU time of each, seconds.
    vcpus: int = 0
    vcpu_seconds: tuple[float, ...] = ()
    #: What libvirt calls the balloon's size, MiB: not the bound, but it changes with it.
    balloon_mib: float = 0.0
    #: What the guest's kernel says through its balloon driver, which works when nothing else in the guest does:
    #: available memory in MiB and major faults since boot, with the time of the statement (seconds since the epoch);
    #: None: it says nothing.
    usable_mib: float | None = None
    major_faults: int | None = None
    said_at: float | None = None
    #: The same and more, for a guest that says nothing else.
    statement: Statement | None = None


@dataclass(frozen=True, slots=True)
class ToSave:
    """What saving a domain's memory to disk takes, MiB."""

    #: The guest's memory that is in use.
    state_mib: float
    #: The memory that it comes up with again: all that its guest may touch.
    memory_mib: float
    #: What is free on the disk for saved memory; None: it is not known.
    free_mib: float | None


@dataclass(frozen=True, slots=True)
class Saved:
    """A domain's memory that was saved to disk."""

    mib: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A domain that may be adopted."""

    vcpus: int
    boot_mib: float
    #: Balloon and plugged memory together, MiB.
    memory_mib: float
    before: Before
    #: Why it cannot be adopted; empty if it can.
    why_not: str = ""
    emulated: bool = False


class DomainSizes(Protocol):
    """A running domain's sizes and limits, read and set. Raises as `Hypervisor`."""

    async def read(self, domain: str) -> HostSideReading:
        """Read the host's side of the bound."""

    async def cpu_seconds(self, domain: str) -> float:
        """Host-side CPU time of all its vCPU threads so far, seconds."""

    async def findings(self, domain: str) -> tuple[Finding, ...]:
        """Which mechanisms the domain has now, why not the others, and what would help. Cheap: for each operation."""

    async def most(self, domain: str) -> ResourceVector:
        """CPU and memory that the running domain can be given at the most: what its definition has room for."""

    async def set_quota(self, domain: str, cores_per_cpu: float | None, cap_cores: float | None) -> None:
        """Limit each vCPU thread, and the whole domain, to this many cores; None lifts the limit.

        Emulator and I/O threads have no quota of their own.
        """

    async def set_shares(self, domain: str, shares: int) -> None:
        """Weigh the domain's CPU time against its neighbours', now and after each start."""

    async def throttled(self, domain: str) -> tuple[int, int]:
        """Periods of the vCPUs' quotas so far, and those in which a quota stopped a vCPU, over all vCPUs."""

    async def set_balloon(self, domain: str, balloon_mib: float, limit_s: float) -> str:
        """Bring the boot memory to this size and wait while it moves; what is not reached is no longer asked for.

        :returns: why it did not get there; empty if it did.
        """

    async def set_plugged(self, domain: str, plugged_mib: float, limit_s: float) -> str:
        """Bring plugged memory to this size: virtio-mem first, then whole DIMMs, as far as they go.

        It is waited for while it moves; what is not reached is no longer asked for.

        :returns: why it did not get there; empty if it did.
        """

    async def ask_plugged(self, domain: str, plugged_mib: float) -> None:
        """Ask the guest for this size of plugged memory, by virtio-mem alone, and do not wait for it."""

    async def set_vcpus(self, domain: str, count: int, limit_s: float) -> str:
        """Bring the domain to this many vCPUs by ACPI, one per step; only where its findings allow it.

        :returns: why it did not get there; empty if it did.
        """

    async def hold_back(self, domain: str) -> None:
        """Ask the guest to plug no more than it has now: what it was to plug at its boot is plugged later."""

    async def call_off(self, domain: str) -> None:
        """Ask the guest for no more and no less memory than it has now: what an earlier attempt asked of it is over."""

    async def set_disk(self, domain: str, disk_mib_s: float | None) -> str:
        """Limit the bandwidth of the domain's disks together; None lifts the limit.

        :returns: why it is not as asked for; empty if it is.
        """

    async def set_network(self, domain: str, network_mib_s: float | None) -> str:
        """Limit the bandwidth of the domain's interfaces, each way; None lifts the limit.

        :returns: why it is not as asked for; empty if it is.
        """

    async def set_limit(self, domain: str, limit_mib: float | None, limit_s: float) -> str:
        """Bring a limit on the guest's whole memory to this size, gradually and only as far as swap backs it.

        :param limit_mib: of the guest's memory, the emulator's own not counted; None lifts the limit.
        :returns: why it did not get there; empty if it did.
        """

    async def ask_statistics(self, domain: str, period_s: int) -> None:
        """Have the running domain's balloon driver asked for its statistics this often; 0: never."""

    async def guest_cpus(self, domain: str) -> GuestCpus | None:
        """What the domain's qemu-guest-agent says of its CPUs, after some seconds at most.

        :returns: None: it does not answer, or has not lately and is left alone.
        """

    async def set_guest_cpus(self, domain: str, online: tuple[int, ...]) -> str:
        """Have the domain's qemu-guest-agent put these CPUs on line, and all others off.

        :returns: why it was not done; empty if it was. What has come of it is to be read.
        """

    async def check_limits(self) -> dict[str, str]:
        """Lift every memory limit of our domains that swap does not back any more; cheap where nothing is limited.

        :returns: why, by domain, for those whose limit was lifted.
        """


class Adoption(Protocol):
    """Domains that were not made here, taken over and given back. Raises as `Hypervisor`."""

    async def examine(self, domain: str) -> Candidate:
        """What a domain of another owner is, and why it cannot be looked after.

        :raises DomainGone: there is none of that name.
        """

    async def take_over(self, domain: str, intent: Intent) -> None:
        """Write the intent into a domain of another owner and remember it as adopted."""

    async def give_back(self, domain: str, before: Before) -> None:
        """Put back what an adopted domain and its definition had, take our metadata out of it and forget it."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A move of a domain to another host."""

    #: Its name there, and the intent that it has there at first.
    domain: str
    intent: Intent
    address: MigrationAddress
    #: Whether its disk goes with it.
    copies: bool
    #: MiB/s at most; 0: no limit.
    bandwidth_mib_s: float
    #: What has not moved by then is called off, seconds.
    deadline_s: float


#: Where a domain is that was to leave: here, here and held by another program's job (behind which its move may wait),
#: on its way, on the other host by what the hypervisor says, or just off.
Whereabouts = Literal["here", "held", "moving", "left", "off"]


class Moves(Protocol):
    """Domains that move between hosts while they run. Raises as `Hypervisor`."""

    @property
    def address(self) -> MigrationAddress | None:
        """Where others reach this host; None: it takes part in no live migration."""

    @property
    def by_command_only(self) -> str:
        """Why no domain is to leave unless somebody asks for that; empty if it may."""

    async def receive(self, domain: str, identity: str, intent: Intent) -> None:
        """Define a domain, with a disk, that one of this identity can move into. Undone on failure."""

    async def send(self, domain: str, move: Departure, told: Callable[[str], None]) -> str:
        """Move a running domain; it returns when it runs there and is off here.

        :param told: called with how far it is.
        :returns: how it went, in words.
        :raises HypervisorError: it did not move, or what became of it is not known: see `whereabouts`.
        """

    async def whereabouts(self, domain: str) -> Whereabouts:
        """Where a domain is that was to leave.

        :raises DomainGone: it is not even defined here.
        """

    async def stop_move(self, domain: str) -> None:
        """Call a move off that is under way; the domain goes on here."""


class Hypervisor(Protocol):
    """The domains of one host.

    Every method raises `hostagent.errors.HypervisorError` when the hypervisor refuses or fails.
    """

    @property
    def sizes(self) -> DomainSizes:
        """What the domains have."""

    @property
    def adoption(self) -> Adoption:
        """What is done to domains of other owners."""

    @property
    def moves(self) -> Moves:
        """Live migration."""

    @property
    def calls(self) -> Calls:
        """How its calls ended so far, and how long they took."""

    async def domains(self) -> list[DomainState]:
        """Our domains: those whose intent names this host as their owner."""

    async def survey(self) -> dict[str, DomainSummary]:
        """All domains that bear a name of this host, of any owner, by name: cheap, for every few seconds."""

    async def resident_mib(self, domains: Iterable[str]) -> dict[str, float]:
        """What each has in the host's memory, the emulator's own included, MiB; 0: it is off. By the host's kernel.

        One that runs and of which the kernel does not tell is left out.
        """

    async def sweep(self, creating: Collection[str] = ()) -> None:
        """Remove what a killed agent left of VMs that it was making or removing.

        :param creating: names of domains that are still being made.
        """

    async def keep(self, domain: str) -> None:
        """A new domain's guest is about to run: from now on its disk is not taken for what is left of a creation."""

    async def is_new(self, domain: str) -> bool:
        """Whether a domain was made here and is not kept yet, so that there is nothing on its disk to lose."""

    async def check(self, spec: VMSpec) -> None:
        """Whether a VM like this could be made here.

        :raises RequestRefused: with the field that is wrong.
        """

    async def create(self, domain: str, intent: Intent, xml: str | None = None) -> None:
        """Define the domain and start it paused, its intent in its metadata; see `keep`. Undone on failure.

        :param xml: checked already, instead of the spec's template.
        """

    async def start(self, domain: str, intent: Intent) -> None:
        """Start a domain that is off, paused; where its intent says so, its definition is written again first.

        One whose memory is saved goes on where it was, as what it was.
        """

    async def redefine(self, domain: str, intent: Intent) -> None:
        """Write the definition of a domain that is off again, by what its VM is sold as now."""

    async def shut_down(self, domain: str, limit_s: float) -> str:
        """Have the guest power off, or cut its power after ``limit_s``; the domain and its disk stay.

        :returns: how it ended, in words; a domain that is off already is no error.
        """

    async def to_save(self, domain: str) -> ToSave:
        """What saving the memory of a running domain takes, and what there is for it."""

    async def save(self, domain: str, limit_s: float) -> Saved:
        """Save a domain's memory to disk and end it; the domain and its disk stay.

        After ``limit_s`` it is called off, which is an error: the domain is still there.
        """

    async def saved_mib(self, domain: str) -> float | None:
        """What the saved memory of a domain takes, MiB; None: it runs, or has none."""

    def templates(self) -> tuple[TemplateInfo, ...]:
        """The templates of this host, by name."""

    @property
    def can_create(self) -> bool:
        """Whether there is a base image, by the last look: every VM that is made here, or arrives, needs it."""

    async def suspend(self, domain: str) -> None:
        """Stop a running domain's vCPUs."""

    async def resume(self, domain: str) -> None:
        """Let a paused domain's vCPUs run."""

    async def prepare_start(self, domain: str, size: ResourceVector) -> None:
        """Write into the persistent definition that the domain comes up no larger than this by any start."""

    async def destroy(self, domain: str) -> None:
        """Stop the domain and remove it with its disk; no error if it is gone already."""

    async def write_intent(self, domain: str, intent: Intent) -> None:
        """Store the intent in the domain's metadata, durably."""

    async def guest_channel(self, domain: str) -> Path | None:
        """The socket of the guest agent's channel; None: it has none.

        :raises HypervisorError: the domain is off, or is not known.
        """

    def on_lifecycle(self, callback: Callable[[str, bool], None]) -> None:
        """Call back on the event loop with a domain's name whenever it starts, stops or reboots, and whether it did
        the last."""

    async def close(self) -> None:
        """Let go of the hypervisor; domains stay as they are."""

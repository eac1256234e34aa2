"""Explanation of a VM: why it has its size, what could still be taken, which layers are blocked, what would help."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from ebbtide.deflation.cascade.forecast import Present
from ebbtide.deflation.cascade.instructions import GuestReading
from ebbtide.deflation.cascade.mechanisms import LAYER_OF, Finding, Mechanism, Mechanisms
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import Explanation, FindingRow, PastResize
from ebbtide.messages.guest import GuestStatus
from ebbtide.messages.vms import VMState
from hostagent.errors import HypervisorError
from hostagent.libvirt.hypervisor import HostSideReading, Hypervisor
from hostagent.mechanisms import fixes
from hostagent.mechanisms.fixes import DomainFacts
from hostagent.state.intents import Intent, Phase
from hostagent.vm.executor import guest_status, why_no_cold
from hostagent.vm.guest_link import SILENT
from hostagent.vm.host import Host
from hostagent.vm.managed_vm import ManagedVM
from hostagent.vm.resizer import NEED_THE_GUEST, NEED_THE_GUEST_TO_TAKE, OWN_MEANS

#: Decisions in one explanation.
DECISIONS: Final = 10
NO_APPLICATION: Final = "no application is registered with the guest agent"
REGISTER: Final = fixes.text(
    "Register the application with the guest agent",
    shell="# in the guest, as root; the application's adapter listens on a socket of root's\n"
    """echo '{"name": "NAME", "url": "unix:/run/ebbtide/hooks/NAME.sock"}' >/etc/ebbtide/adapters.d/NAME.json""",
)
DOING: Final = {VMState.DEFLATING: "deflated", VMState.REINFLATING: "reinflated"}


@dataclass(frozen=True, slots=True)
class Survey:
    """All that can be read of a VM without changing anything."""

    #: None: it could not be read.
    reading: HostSideReading | None
    status: GuestStatus | None
    #: One for each mechanism: whether it can be used to take.
    findings: tuple[Finding, ...]
    #: And to give, for which less of the guest is needed.
    giving: tuple[Finding, ...]
    #: What a guest that runs nothing of ours lets be taken; None: it has our agent, or it is not known.
    ordinary: GuestReading | None = None

    def present(self, intent: Intent) -> Present | None:
        """The VM as a forecast takes it."""
        if self.reading is None:
            return None
        guest = self.ordinary
        if self.status is not None:
            cpus = self.status.cpus
            guest = GuestReading(tuple(cpus.online), tuple(cpus.unpluggable), self.status.memory.unpluggable_mib)
        online = len(guest.online) if guest is not None else None
        bound = self.reading.bound(online, intent.spec.nominal.vector())
        vcpus = max(self.reading.vcpus, math.ceil(intent.spec.nominal.cpu_cores))
        taking, giving = Mechanisms.of(self.findings), Mechanisms.to_give(self.giving)
        return Present(bound, guest, intent.boot_mib, vcpus, taking, giving)


async def survey(hypervisor: Hypervisor, vm: ManagedVM) -> Survey:
    """Read a VM now; what cannot be read is missing, and nothing is raised."""
    status, reading, findings = await asyncio.gather(
        guest_status(vm.link, breaks=False), _reading(hypervisor, vm.domain), _findings(hypervisor, vm.domain)
    )
    own = () if vm.link.has_channel else OWN_MEANS
    guest = None
    if not vm.link.has_channel and reading is not None:
        vm.resizer.ordinary.observe(reading.read_at, reading.statement, reading.qemu_agent)
        guest = vm.resizer.ordinary.reading(reading.vcpus)
    taking, giving = (
        findings_now(
            vm.domain, findings, status, [mechanism for mechanism in need if mechanism not in own], vm.link.silence
        )
        for need in (NEED_THE_GUEST_TO_TAKE, NEED_THE_GUEST)
    )
    return Survey(reading, status, taking, giving, guest)


async def explain(host: Host, name: str) -> Explanation:
    """Everything about a VM's size.

    :raises RequestRefused: there is no such VM (404).
    """
    vm = host.vm(name)
    found = await survey(host.hypervisor, vm)
    present = found.present(vm.intent) if vm.running else None
    resizes, status = host.history.resizes(name), vm.status()
    return Explanation(
        vm=status,
        sentence=why_this_size(vm.intent, status.state, resizes[-1] if resizes else None),
        bound=Vector.of(present.bound.size) if present is not None else None,
        deflatable=Vector.of(vm.row().deflatable),
        mode=host.modes.mode,
        mode_reason=host.modes.reason,
        findings=tuple(FindingRow.of(finding) for finding in found.findings),
        resizes=resizes,
        decisions=host.history.decisions(name, limit=DECISIONS),
    )


def findings_now(
    domain: str,
    findings: tuple[Finding, ...] | HypervisorError,
    status: GuestStatus | None,
    need: Collection[Mechanism] = NEED_THE_GUEST_TO_TAKE,
    silence: str = SILENT,
) -> tuple[Finding, ...]:
    """One finding for each mechanism, in their order: what the domain has, less what its guest does not do now.

    What is blocked already keeps its reason: it would be blocked with a willing guest too.

    :param need: what cannot be used on a guest that does not answer.
    :param silence: why it does not.
    """
    known = {finding.mechanism: finding for finding in findings} if isinstance(findings, tuple) else {}
    rows = []
    for mechanism in Mechanism:
        finding = known.get(mechanism)
        if isinstance(findings, HypervisorError):
            finding = Finding(mechanism, False, f"the domain could not be examined: {findings}")
        elif finding is None or finding.available:
            finding = _by_the_guest(domain, mechanism, status, need, silence) or finding
        rows.append(finding or Finding(mechanism, True, f"the {LAYER_OF[mechanism].value} layer has it"))
    return tuple(rows)


def _by_the_guest(
    domain: str, mechanism: Mechanism, status: GuestStatus | None, need: Collection[Mechanism], silence: str
) -> Finding | None:
    """What the guest blocks at this moment; None if nothing."""
    if status is None and mechanism in need:
        return Finding(mechanism, False, silence, fixes.guest_agent(DomainFacts(domain, 0, 0)))
    if mechanism is Mechanism.COLD and status is not None and (why := why_no_cold(status)):
        return Finding(mechanism, False, f"unsupported: {why}")
    if mechanism is Mechanism.APPLICATION and status is not None:
        if not status.applications:
            return Finding(mechanism, False, NO_APPLICATION, REGISTER)
        names = ", ".join(f"{a.name} ({a.resident_mib:.0f} MiB resident)" for a in status.applications)
        return Finding(mechanism, True, f"{names}; what it gives is known when it is asked")
    return None


def why_this_size(intent: Intent, state: VMState, last: PastResize | None) -> str:
    """Why a VM has the size it has, in one sentence.

    :param last: its latest resize, where this agent carried it out; the ledger of an earlier agent's is gone.
    """
    name, has = intent.spec.name, intent.committed.vector()
    cause = f"{intent.cause.kind} {intent.cause.request_id}" if intent.cause is not None else "an unknown cause"
    if intent.cause is not None:
        cause += f" (begun {_utc(intent.cause.started_at)})"
    if intent.phase is Phase.DELETING:
        return f"{name} is being removed by {cause}; {has} comes free"
    match state:
        case VMState.STARTING:
            return f"{name} is being started with {has} by {cause}"
        case VMState.STOPPING:
            return f"{name} is being stopped by {cause}; {has} comes free"
        case VMState.PAUSED:
            return f"{name} is paused; it keeps {has}"
        case VMState.STOPPED if intent.phase is Phase.STOPPED:
            return f"{name} is off and holds no room; it comes up with {has}"
        case VMState.STOPPED:
            return f"{name} is off; {has} comes free as soon as that is written down"
        case VMState.DEFLATING | VMState.REINFLATING:
            return f"{name} is being {DOING[state]} to {intent.target.vector()} by {cause}; it is charged with {has}"
    said = f"{name} has {_against_nominal(has, intent.spec.nominal.vector())}"
    if has.fits_in(intent.spec.nominal.vector()) and intent.spec.nominal.vector().fits_in(has):
        return said
    by = intent.cause.request_id if intent.cause is not None else ""
    if intent.cause is not None and intent.cause.gently:
        return f"{said}, since steady mode has trimmed what lay idle in it: room for arrivals ({cause})"
    how = f": {last.outcome.sentence}" if last is not None and last.request_id == by else ""
    return f"{said}, since {cause}{how}"


def _against_nominal(has: ResourceVector, nominal: ResourceVector) -> str:
    less, more = nominal.less(has), has.less(nominal)
    if less.is_zero() and more.is_zero():
        return f"its nominal size ({has}): nothing is taken from it"
    parts = [f"{less} less" if not less.is_zero() else "", f"{more} more" if not more.is_zero() else ""]
    return f"{has}, which is {' and '.join(filter(None, parts))} than its nominal size ({nominal})"


async def _reading(hypervisor: Hypervisor, domain: str) -> HostSideReading | None:
    try:
        return await hypervisor.sizes.read(domain)
    except HypervisorError:
        return None


async def _findings(hypervisor: Hypervisor, domain: str) -> tuple[Finding, ...] | HypervisorError:
    try:
        return await hypervisor.sizes.findings(domain)
    except HypervisorError as error:
        return error


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))

"""`ebb vm doctor VM`: which layers a VM has, why not the others, and what to copy to put it right. Changes nothing.

Works for any domain of a libvirt on this machine, ours or not, running or not. libvirt is imported where it is used:
the doctor has to run where it is missing, too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.deflation.cascade.instructions import GuestKind
from ebbtide.deflation.cascade.mechanisms import Finding
from ebbtide.deflation.cascade.ordinary import Gift, gifts
from ebbtide.errors import EbbError
from ebbtide.lab import paths
from ebbtide.lab.services import open_libvirt
from hostagent.mechanisms.accelerator import host_kernel, probe_accelerator


@dataclass(frozen=True)
class VMDiagnosis:
    """What was found about one domain."""

    domain: str
    running: bool
    findings: tuple[Finding, ...]
    kind: GuestKind
    #: What it would give now as each kind; empty: it does not run.
    gifts: tuple[Gift, ...] = ()

    def steps_up(self) -> list[tuple[Gift, str]]:
        """What it gives as it is, and what each kind above would give more."""
        own = next((gift for gift in self.gifts if gift.kind is self.kind), None)
        if own is None:
            return []
        more = self.gifts[self.gifts.index(own) + 1 :]
        return [(own, "as it is"), *((gift, _more(own, gift)) for gift in more)]

    def fixes(self) -> dict[str, list[str]]:
        """Each text once, with the mechanisms that it is for."""
        found: dict[str, list[str]] = {}
        for finding in self.findings:
            for text in filter(None, finding.fix.split("\n\n")):
                found.setdefault(text, []).append(finding.mechanism.value)
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "domain": self.domain,
            "running": self.running,
            "guest_kind": self.kind.value,
            "gives": [
                {"guest_kind": gift.kind.value, "memory_mib": gift.memory_mib, "cpu_cores_offline": gift.cpus}
                for gift, _ in self.steps_up()
            ],
            "mechanisms": [
                {
                    "layer": finding.layer.value,
                    "mechanism": finding.mechanism.value,
                    "available": finding.available,
                    "reason": finding.reason,
                    "fixes": [text for text in finding.fix.split("\n\n") if text],
                }
                for finding in self.findings
            ],
        }


def examine_vm(name: str, uri: str) -> VMDiagnosis:
    """Look at a domain, or at the managed VM of that name.

    Raises LabError when libvirt does not answer, EbbError when there is no such VM or more than one.
    """
    connection = open_libvirt(uri, read_only=True)
    try:
        import libvirt

        from hostagent.libvirt.libvirt_readings import statement_of
        from hostagent.mechanisms.host_facts import Versions, findings_of, host_facts
        from hostagent.mechanisms.layers import kind_of

        try:
            domain = find_domain(connection, name)
            facts = host_facts(Versions.of(connection), paths.acpi_verdict())
            running, findings = bool(domain.isActive()), findings_of(domain, facts)
            kind, vcpus = kind_of(domain.XMLDesc())
            if not running:
                return VMDiagnosis(domain.name(), running, findings, kind)
            said = None
            with contextlib.suppress(libvirt.libvirtError):
                said = statement_of(domain.memoryStats())
            return VMDiagnosis(domain.name(), running, findings, kind, gifts(vcpus, said, time.time()))
        except libvirt.libvirtError as error:
            raise EbbError(f"{name} cannot be looked at: {error}") from error
    finally:
        connection.close()


def _more(own: Gift, gift: Gift) -> str:
    """What one kind gives more than another, in words."""
    cores = f"{gift.cpus - own.cpus} more cores off line" if gift.cpus > own.cpus else ""
    memory = ""
    if gift.memory_mib is not None and own.memory_mib is not None and gift.memory_mib > own.memory_mib:
        memory = f"{gift.memory_mib - own.memory_mib:.0f} MiB more"
    release = "what its applications release" if gift.kind is GuestKind.AGENT else ""
    return ", ".join(filter(None, (memory, cores, release))) or "nothing more"


def find_domain(connection: Any, name: str) -> Any:
    """A domain by its own name, else by the VM's name behind its host's: ``ebb-HOST.NAME``."""
    domains = connection.listAllDomains()
    exact = [domain for domain in domains if domain.name() == name]
    managed = [d for d in domains if d.name().startswith("ebb-") and d.name().partition(".")[2] == name]
    found = exact or managed
    if not found:
        raise EbbError(f"there is no VM and no domain {name}; `virsh list --all` shows the domains")
    if len(found) > 1:
        names = ", ".join(sorted(domain.name() for domain in found))
        raise EbbError(f"{name} is the name of several VMs: {names}; name one of these")
    return found[0]


@dataclass(frozen=True)
class AcpiVerdict:
    """Whether vCPUs may be unplugged on this host."""

    passed: bool
    reason: str


def probe_acpi(uri: str, report: Callable[[str], None]) -> AcpiVerdict:
    """Let a throw-away guest try ACPI vCPU unplug, and remember the outcome for the agents of this host.

    Under emulation the answer is no without a guest. Raises LabError when libvirt does not answer, EbbError when there
    is no kernel to boot.
    """
    kernel = _kernel()
    accelerator = probe_accelerator(kernel, None, paths.accelerator_cache())
    connection = open_libvirt(uri)
    try:
        from hostagent.mechanisms import acpi_probe
        from hostagent.mechanisms.host_facts import Versions
        from hostagent.mechanisms.layers import NO_UNPLUG_EMULATED

        if accelerator.kind == "qemu":
            return AcpiVerdict(False, NO_UNPLUG_EMULATED)
        if kernel is None:
            raise EbbError("there is no kernel to boot a guest with; `ebb lab image build` builds one")
        passed, reason = acpi_probe.try_unplug(connection, kernel, accelerator.kind, report)
        key = Versions.of(connection).key(accelerator.kind)
        try:
            acpi_probe.remember(paths.acpi_verdict(), key, passed, reason)
        except OSError as error:
            raise EbbError(f"{reason}; it cannot be kept for the agents: {error}") from error
        return AcpiVerdict(passed, reason)
    finally:
        connection.close()


def _kernel() -> Path | None:
    images = sorted(paths.image_cache().glob("*/vmlinuz"), key=lambda path: path.stat().st_mtime)
    return images[-1] if images else host_kernel()

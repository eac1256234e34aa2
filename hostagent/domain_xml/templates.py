"""Renderer of a VM's libvirt XML, out of a named template on the host and the VM's parameters.

Templates are files NAME.xml in directories of the host, never part of a request: an `<emulator>` or a host path in a
request would be root on the host. Elements: https://libvirt.org/formatdomain.html.
"""

from __future__ import annotations

import hashlib
import math
import re
import string
import uuid as uuids
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

from hostagent.errors import HostAgentError

PACKAGED = Path(__file__).parent / "templates"
# libvirt lets aliases of users begin with `ua-` only.
MEMORY_ALIAS = "ua-ebbtide-memory"
MEMORY_BLOCK_MIB = 2
LEAST_BOOT_MEMORY_MIB = 384
# Guest kernels plug memory in blocks of this size (x86: Documentation/admin-guide/mm/memory-hotplug.rst).
GUEST_BLOCK_MIB = 128
_TEMPLATE_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_DOMAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The cache of translated code would grow to a gigabyte and hide what a guest gives back.
_TCG_FEATURES = "<tcg><tb-cache unit='MiB'>64</tb-cache></tcg>"
# A CPU that is off line waits in MWAIT, which emulation turns into a busy loop on the host; without it, it halts.
_TCG_CPU_FEATURES = "<feature policy='disable' name='monitor'/>"


class TemplateError(HostAgentError):
    """A template or a parameter of a VM cannot be used; the text names it."""


@dataclass(frozen=True)
class MemoryLayout:
    """How a VM's memory is split, in MiB: memory to boot with, and a virtio-mem device of which a part is asked for."""

    boot_mib: int
    device_mib: int
    requested_mib: int


@dataclass(frozen=True)
class DomainParameters:
    """What a template needs to become a VM.

    cpu_cores, memory_mib: the nominal size; ceiling_*: the largest size ever, default nominal. boot_memory_mib: memory
    that cannot be unplugged, default half. kernel_arguments: added to the template's own. metadata: one XML element
    with a namespace, the VM's intent.
    """

    name: str
    uuid: str
    cpu_cores: float
    memory_mib: int
    accelerator: Literal["kvm", "qemu"]
    kernel: Path
    initrd: Path
    disk: Path
    console: Path
    ceiling_cpu_cores: float | None = None
    ceiling_memory_mib: int | None = None
    boot_memory_mib: int | None = None
    #: Memory to start with; default nominal.
    initial_memory_mib: int | None = None
    kernel_arguments: tuple[str, ...] = ()
    metadata: str | None = None

    def __post_init__(self) -> None:
        if not _DOMAIN_NAME.fullmatch(self.name):
            raise TemplateError(f"name {self.name!r} may hold letters, digits, dots, dashes and underscores only")
        try:
            uuids.UUID(self.uuid)
        except ValueError as error:
            raise TemplateError(f"uuid {self.uuid!r} is not a UUID") from error
        if self.accelerator not in ("kvm", "qemu"):
            raise TemplateError(f"accelerator {self.accelerator!r} is neither kvm nor qemu")
        for field, value in (("cpu_cores", self.cpu_cores), ("memory_mib", self.memory_mib)):
            if not math.isfinite(value) or value <= 0:
                raise TemplateError(f"{field} is {value}, but must be positive")
        for field, ceiling, nominal in (
            ("ceiling_cpu_cores", self.ceiling_cpu_cores, self.cpu_cores),
            ("ceiling_memory_mib", self.ceiling_memory_mib, self.memory_mib),
        ):
            if ceiling is not None and not (math.isfinite(ceiling) and ceiling >= nominal):
                raise TemplateError(f"{field} is {ceiling}, but must be at least the nominal {nominal}")
        for argument in self.kernel_arguments:
            if not argument or any(letter.isspace() for letter in argument):
                raise TemplateError(f"kernel_arguments has {argument!r}, but each must be one word")

    @property
    def vcpus(self) -> int:
        """vCPUs that are plugged at start."""
        return math.ceil(self.cpu_cores)

    @property
    def maximum_vcpus(self) -> int:
        return max(self.vcpus, math.ceil(self.ceiling_cpu_cores or 0))

    def memory(self) -> MemoryLayout:
        """Half of the nominal memory can be unplugged, unless boot_memory_mib says otherwise or little would be left.

        The device is always there, with room up to the ceiling. Raises TemplateError.
        """
        boot_mib = self.boot_memory_mib
        if boot_mib is None:
            half_mib = math.ceil(self.memory_mib / 2 / MEMORY_BLOCK_MIB) * MEMORY_BLOCK_MIB
            boot_mib = min(max(LEAST_BOOT_MEMORY_MIB, half_mib), self.memory_mib)
        if not 0 < boot_mib <= self.memory_mib:
            raise TemplateError(f"boot_memory_mib is {boot_mib}, but must be in 1..{self.memory_mib}")
        requested_mib = (self.memory_mib - boot_mib) // MEMORY_BLOCK_MIB * MEMORY_BLOCK_MIB
        boot_mib = self.memory_mib - requested_mib
        room_mib = max(self.ceiling_memory_mib or 0, self.memory_mib) - boot_mib
        if self.initial_memory_mib is not None:
            more_mib = max(self.initial_memory_mib - boot_mib, 0) // MEMORY_BLOCK_MIB * MEMORY_BLOCK_MIB
            requested_mib = min(requested_mib, more_mib)
        # Whole guest blocks, since a kernel leaves the rest of a device unplugged.
        device_mib = max(1, math.ceil(room_mib / GUEST_BLOCK_MIB)) * GUEST_BLOCK_MIB
        return MemoryLayout(boot_mib, device_mib, requested_mib)


@dataclass(frozen=True)
class DomainTemplate:
    """The text of a template, by name."""

    name: str
    text: str

    @classmethod
    def load(cls, name: str, directories: Sequence[Path] = (PACKAGED,)) -> DomainTemplate:
        """Read NAME.xml from the first directory that has it. Raises TemplateError for a bad or unknown name."""
        if not _TEMPLATE_NAME.fullmatch(name):
            raise TemplateError(f"template {name!r} may hold lower-case letters, digits and dashes only")
        for directory in directories:
            path = directory / f"{name}.xml"
            if path.is_file():
                return cls(name, path.read_text(encoding="utf-8"))
        raise TemplateError(f"template {name} is in none of {', '.join(str(directory) for directory in directories)}")


def render_domain(template: DomainTemplate, parameters: DomainParameters) -> str:
    """The domain XML of a VM. Raises TemplateError when a parameter or the template cannot be used."""
    layout = parameters.memory()
    values = {
        "accelerator": parameters.accelerator,
        "name": parameters.name,
        "uuid": parameters.uuid,
        "vcpus": parameters.vcpus,
        "maximum_vcpus": parameters.maximum_vcpus,
        "last_vcpu": parameters.maximum_vcpus - 1,
        "memory_mib": parameters.memory_mib,
        "boot_memory_mib": layout.boot_mib,
        "device_memory_mib": layout.device_mib,
        "requested_memory_mib": layout.requested_mib,
        "total_memory_mib": layout.boot_mib + layout.device_mib,
        "maximum_memory_mib": layout.boot_mib + layout.device_mib,
        "dimm_total_memory_mib": layout.boot_mib + layout.requested_mib // GUEST_BLOCK_MIB * GUEST_BLOCK_MIB,
        "memory_alias": MEMORY_ALIAS,
        "cpu_mode": "host-passthrough" if parameters.accelerator == "kvm" else "maximum",
        "kernel": parameters.kernel,
        "initrd": parameters.initrd,
        "disk": parameters.disk,
        "console": parameters.console,
        "tap": tap_name(parameters.name),
        "kernel_arguments": " ".join(parameters.kernel_arguments),
    }
    escaped = {name: escape(str(value), {"'": "&apos;", '"': "&quot;"}) for name, value in values.items()}
    fragments = {
        "metadata": _metadata(parameters.metadata),
        "vcpu_elements": _vcpu_elements(parameters.vcpus, parameters.maximum_vcpus),
        "accelerator_features": _TCG_FEATURES if parameters.accelerator == "qemu" else "",
        "dimm_elements": _dimm_elements(parameters) if "$dimm_elements" in template.text else "",
        "cpu_features": _TCG_CPU_FEATURES if parameters.accelerator == "qemu" else "",
    }
    try:
        xml = string.Template(template.text).substitute(escaped | fragments)
        ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise TemplateError(f"template {template.name} is not well-formed XML: {error}") from error
    except (KeyError, ValueError) as error:
        raise TemplateError(f"template {template.name} has a $-name that is not known: {error}") from error
    return xml


def tap_name(domain: str) -> str:
    """The tap of a domain whose template has an interface: at most 15 letters, another one for every domain."""
    return f"ebb{hashlib.sha256(domain.encode()).hexdigest()[:10]}"


def _metadata(element: str | None) -> str:
    if element is None:
        return ""
    try:
        root = ElementTree.fromstring(element)
    except ElementTree.ParseError as error:
        raise TemplateError(f"metadata is not one well-formed XML element: {error}") from error
    if not root.tag.startswith("{"):
        raise TemplateError(f"metadata element {root.tag} has no namespace, which libvirt asks for")
    # Serialised again, so that nothing but the element gets through (no declaration, no document type).
    return ElementTree.tostring(root, encoding="unicode")


def _dimm_elements(parameters: DomainParameters) -> str:
    """What can be unplugged as DIMMs of one guest block each; there is no room up to a ceiling.

    A VM that starts below its nominal size starts with the DIMMs that fit; the others are plugged as it grows.
    """
    layout = parameters.memory()
    most_mib = parameters.memory_mib - layout.boot_mib
    if most_mib % GUEST_BLOCK_MIB or layout.device_mib > max(most_mib, GUEST_BLOCK_MIB):
        raise TemplateError(
            f"boot_memory_mib is {layout.boot_mib}, but must leave whole DIMMs of {GUEST_BLOCK_MIB} MiB to memory_mib"
        )
    number = layout.requested_mib // GUEST_BLOCK_MIB
    if number == 0 < most_mib:
        least_mib = layout.boot_mib + GUEST_BLOCK_MIB
        raise TemplateError(f"start_size.memory_mib must be {least_mib} at least: it starts with one DIMM or more")
    return dimm_element(GUEST_BLOCK_MIB) * number


def dimm_element(size_mib: int) -> str:
    """A DIMM, for libvirt to find a slot for."""
    size = f"<size unit='MiB'>{size_mib}</size><node>0</node>"
    return f"<memory model='dimm'><target>{size}</target></memory>"


def _vcpu_elements(plugged: int, maximum: int) -> str:
    """vCPU 0 is there for good, all others can be unplugged."""
    return "".join(
        f"<vcpu id='{number}' enabled='{'yes' if number < plugged else 'no'}'"
        f" hotpluggable='{'no' if number == 0 else 'yes'}'/>"
        for number in range(maximum)
    )

"""Definitions of VMs: made of a template or of XML in a request, and made again when a VM is sold something else.

Elements: https://libvirt.org/formatdomain.html.
"""

from __future__ import annotations

import asyncio
import copy
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, Final

import libvirt

from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.hosts import TemplateInfo
from ebbtide.messages.vms import XML_TEMPLATE, VMSpec
from hostagent.domain_xml.image_paths import check_files
from hostagent.domain_xml.template_library import TemplateLibrary, sample
from hostagent.domain_xml.templates import (
    MEMORY_ALIAS,
    MEMORY_BLOCK_MIB,
    DomainParameters,
    TemplateError,
    render_domain,
)
from hostagent.domain_xml.xml_allow_list import Rights, XMLRefused, check, parse
from hostagent.errors import RequestRefused
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.limits import bandwidth
from hostagent.state import intents
from hostagent.state.intents import Intent

_GUEST_CHANNELS: Final = ("org.qemu.guest_agent.0", "io.ebbtide.guest.0")
#: What of a definition is made anew when its VM is sold something else: elements, by the path of their parent.
_SOLD: Final = {
    ".": ("maxMemory", "memory", "currentMemory", "vcpu", "vcpus"),
    "metadata": (f"{{{intents.NAMESPACE}}}{intents.ELEMENT}",),
    "cpu": ("numa", "topology"),
    "devices": ("memory",),
}
#: Tells the lab's guests how much memory to wait for.
_MEMORY_WORD: Final = re.compile(r"(?<=\bebbtide\.memory_mib=)\d+")


class Definitions:
    """Makes the XML of this host's VMs."""

    def __init__(self, settings: LibvirtSettings) -> None:
        self._settings = settings
        self._library = settings.library

    def templates(self) -> tuple[TemplateInfo, ...]:
        """By name; none before `library` has been called."""
        return self._library.infos if self._library is not None else ()

    async def library(self) -> TemplateLibrary:
        """The host's templates, read at the first call.

        :raises TemplateError: one of them cannot be used.
        """
        if self._library is None:
            self._library = await asyncio.to_thread(TemplateLibrary.load, self._settings.template_dirs)
        return self._library

    async def check(self, spec: VMSpec) -> None:
        """Whether a VM like this could be made here.

        :raises RequestRefused: with the field that is wrong.
        """
        if spec.xml is not None:
            try:
                xml = ElementTree.tostring(await self._allowed(spec.xml), encoding="unicode")
            except XMLRefused as error:
                raise RequestRefused(400, f"vm.xml: {error}", "vm.xml") from error
        else:
            library = await self.library()
            try:
                xml = render_domain(library.get(spec.template), sample(spec.nominal.memory_mib, None))
            except TemplateError as error:
                raise RequestRefused(400, str(error), "vm.template") from error
            library.check_size(spec)
        nominal = spec.nominal.vector()
        what = "this XML" if spec.xml is not None else f"template {spec.template}"
        for name, why in (
            ("disk_mib_s", bandwidth.disk_blocked(xml)),
            ("network_mib_s", bandwidth.network_blocked(xml)),
        ):
            if nominal[name] > 0 and why:
                raise RequestRefused(400, f"{name} cannot be held with {what}: {why}", f"vm.nominal.{name}")

    async def fresh(self, domain: str, identity: str, intent: Intent, disk: Path, xml: str | None) -> str:
        """The XML of a new VM.

        :raises TemplateError: its template cannot be used; `XMLRefused`: its XML is not allowed.
        """
        parameters = self._parameters(domain, identity, intent, disk)
        if xml is None:
            return render_domain((await self.library()).get(intent.spec.template), parameters)
        root = await self._allowed(xml)
        fit(root, parameters)
        _add_channels(root)
        return ElementTree.tostring(root, encoding="unicode")

    async def again(self, domain: str, intent: Intent, present: str) -> str:
        """The XML of a VM that exists and is sold something else.

        :param present: its definition; what its size does not decide (disks, interfaces) stays as it is there.
        :raises TemplateError: its template cannot be used.
        """
        root = ElementTree.fromstring(present)
        identity = root.findtext("uuid", "").strip()
        parameters = self._parameters(domain, identity, intent, self._settings.disk_dir / domain / "disk.qcow2")
        if intent.spec.template != XML_TEMPLATE:
            xml = render_domain((await self.library()).get(intent.spec.template), parameters)
            made = ElementTree.fromstring(xml)
        else:
            fit(made := copy.deepcopy(root), parameters)
        _sell(root, made)
        for line in root.findall("./os/cmdline"):
            line.text = _MEMORY_WORD.sub(str(parameters.memory_mib), line.text or "")
        bandwidth.undeclare(root, intent.spec.nominal.vector())
        return ElementTree.tostring(root, encoding="unicode")

    async def _allowed(self, xml: str) -> ElementTree.Element:
        prefixes = tuple(str(prefix) for prefix in self._settings.image_prefixes)
        if not prefixes:
            raise XMLRefused("this host takes no XML: its agent was started without --image-prefix")
        root = parse(xml)
        uses = check(root, Rights(prefixes))
        alone = await asyncio.to_thread(check_files, uses, prefixes)
        for disk in root.findall("./devices/disk"):
            source, backing = disk.find("source"), disk.find("backingStore")
            if source is not None and source.get("file") in alone and backing is None:
                # No chain to follow: whatever the guest writes into its image's header names no file.
                ElementTree.SubElement(disk, "backingStore")
        return root

    def _parameters(self, domain: str, identity: str, intent: Intent, disk: Path) -> DomainParameters:
        spec, image = intent.spec, self._settings.image_dir
        return DomainParameters(
            name=domain,
            uuid=identity,
            # All vCPUs up to the ceiling are there from the start: what limits the VM is its quota.
            cpu_cores=(spec.ceiling or spec.nominal).cpu_cores,
            memory_mib=int(spec.nominal.memory_mib),
            initial_memory_mib=int(intent.committed.memory_mib),
            accelerator=self._settings.accelerator,
            kernel=image / "vmlinuz",
            initrd=image / "initrd",
            disk=disk,
            console=self._settings.disk_dir / domain / "console.log",
            ceiling_cpu_cores=spec.ceiling.cpu_cores if spec.ceiling else None,
            ceiling_memory_mib=int(spec.ceiling.memory_mib) if spec.ceiling else None,
            boot_memory_mib=int(intent.boot_mib),
            metadata=intents.to_qualified_element(intent),
        )


def fit(root: ElementTree.Element, parameters: DomainParameters) -> None:
    """Write name, sizes and metadata of a VM into a domain's XML, whatever stood there."""
    layout = parameters.memory()
    root.set("type", parameters.accelerator)
    for tag in ("name", "uuid", "metadata", "maxMemory", "memory", "currentMemory", "vcpu", "vcpus"):
        for element in root.findall(tag):
            root.remove(element)
    devices = root.find("devices")
    if devices is None:
        devices = ElementTree.SubElement(root, "devices")
    for memory in devices.findall("memory"):
        devices.remove(memory)
    cpu = root.find("cpu")
    if cpu is None:
        cpu = ElementTree.SubElement(
            root, "cpu", mode="maximum" if parameters.accelerator == "qemu" else "host-passthrough"
        )
    for tag in ("numa", "topology"):
        for element in cpu.findall(tag):
            cpu.remove(element)
    last, maximum = parameters.maximum_vcpus - 1, str(parameters.maximum_vcpus)
    numa = ElementTree.SubElement(cpu, "numa")
    cell = {"id": "0", "cpus": f"0-{last}", "memory": str(layout.boot_mib), "unit": "MiB"}
    ElementTree.SubElement(numa, "cell", cell)
    total = layout.boot_mib + layout.device_mib
    head = [
        _text("name", parameters.name),
        _text("uuid", parameters.uuid),
        _text("maxMemory", str(total), unit="MiB", slots="8"),
        _text("memory", str(total), unit="MiB"),
        _text("currentMemory", str(parameters.memory_mib), unit="MiB"),
        _text("vcpu", maximum, placement="static", current=str(parameters.vcpus)),
    ]
    vcpus = ElementTree.Element("vcpus")
    for number in range(parameters.maximum_vcpus):
        enabled, pluggable = number < parameters.vcpus, number > 0
        ElementTree.SubElement(
            vcpus,
            "vcpu",
            {"id": str(number), "enabled": _yes(enabled), "hotpluggable": _yes(pluggable)},
        )
    head.append(vcpus)
    if parameters.metadata is not None:
        metadata = ElementTree.Element("metadata")
        metadata.append(ElementTree.fromstring(parameters.metadata))
        head.append(metadata)
    for place, element in enumerate(head):
        root.insert(place, element)
    device = ElementTree.SubElement(devices, "memory", model="virtio-mem")
    target = ElementTree.SubElement(device, "target")
    target.append(_text("size", str(layout.device_mib), unit="MiB"))
    target.append(_text("node", "0"))
    target.append(_text("block", str(MEMORY_BLOCK_MIB * 1024), unit="KiB"))
    target.append(_text("requested", str(layout.requested_mib), unit="MiB"))
    ElementTree.SubElement(device, "alias", name=MEMORY_ALIAS)


def _sell(root: ElementTree.Element, made: ElementTree.Element) -> None:
    """Put into a definition what another one of the same VM has of sizes and of our metadata."""
    for path, tags in _SOLD.items():
        there, new = root.find(path), made.find(path)
        if new is None:
            continue
        if there is None:
            there = ElementTree.SubElement(root, path, new.attrib)
        for old in [element for element in there if element.tag in tags]:
            there.remove(old)
        there.extend([element for element in new if element.tag in tags])


def most_of(root: ElementTree.Element, plugs_cpus: bool) -> ResourceVector:
    """What a running domain can be given at the most, by its live XML (sizes in KiB, as libvirt writes them)."""
    vcpu = root.find("vcpu")
    maximum = int((vcpu.text or "1").strip()) if vcpu is not None else 1
    current = int(vcpu.get("current") or maximum) if vcpu is not None else 1
    memory = root.find("memory")
    memory_mib = float(memory.text or 0) / 1024 if memory is not None else 0.0
    return ResourceVector(cpu_cores=float(maximum if plugs_cpus else current), memory_mib=memory_mib)


def inactive_xml(domain: Any) -> str:
    """A domain's definition, whole. Blocks."""
    return str(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE))


def usable_boot_mib(memory_mib: float, boot_mib: float | None) -> float:
    """The boot memory that `hostagent.domain_xml.templates.DomainParameters.memory` settles on."""
    return float(sample(memory_mib, boot_mib).memory().boot_mib)


def _add_channels(root: ElementTree.Element) -> None:
    """Both agents' channels, where the XML has none of that name."""
    devices = root.find("devices")
    assert devices is not None, "fit has made it"
    named = {target.get("name") for target in devices.findall("./channel/target")}
    for name in _GUEST_CHANNELS:
        if name not in named:
            channel = ElementTree.SubElement(devices, "channel", type="unix")
            ElementTree.SubElement(channel, "target", type="virtio", name=name)
    if devices.find("memballoon") is None:
        balloon = ElementTree.SubElement(devices, "memballoon", model="virtio", freePageReporting="on")
        ElementTree.SubElement(balloon, "stats", period="1")


def _text(tag: str, text: str, **attributes: str) -> ElementTree.Element:
    element = ElementTree.Element(tag, attributes)
    element.text = text
    return element


def _yes(value: bool) -> str:
    return "yes" if value else "no"

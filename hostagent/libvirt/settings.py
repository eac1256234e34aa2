"""Settings of the hypervisor: where it finds images, disks and templates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hostagent.domain_xml.template_library import TemplateLibrary
from hostagent.domain_xml.templates import PACKAGED
from hostagent.state.files import ACPI_VERDICT, SAVE_DIR


@dataclass(frozen=True, slots=True)
class LibvirtSettings:
    """Where the hypervisor finds what it needs."""

    host_id: str
    uri: str
    accelerator: Literal["kvm", "qemu"]
    #: Holds base.qcow2, vmlinuz and initrd.
    image_dir: Path
    #: Below it, each VM has a directory of its own.
    disk_dir: Path
    template_dirs: tuple[Path, ...] = (PACKAGED,)
    #: What `ebb doctor --probe-acpi` found.
    acpi_verdict: Path = ACPI_VERDICT
    #: The templates, where they have been read already.
    library: TemplateLibrary | None = None
    #: Below these the files of XML in requests must lie; none: no XML is taken.
    image_prefixes: tuple[Path, ...] = ()
    #: Where libvirt keeps saved memory.
    save_dir: Path = SAVE_DIR
    #: Names the adopted domains; None: they are remembered for as long as this process lives.
    adopted: Path | None = None
    #: Where other hosts' libvirt reaches this one, and where memory arrives; None: no live migration.
    migration_uri: str | None = None
    migration_listen: str = "127.0.0.1"
    #: Whether emulated guests may leave without a command although this QEMU may harm them.
    migration_emulated: bool = False
    #: Whether cold pages of guests become free before memory is unplugged.
    cold_first: bool = False

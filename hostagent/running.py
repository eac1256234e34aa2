"""Running: the agent put together as its options say."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from typing import Any

import structlog

from ebbtide.messages.hosts import capacity_of
from ebbtide.rest.options import Given
from ebbtide.rest.settings import AccessSettings
from ebbtide.tracing.exporting import exporting
from hostagent.domain_xml.template_library import TemplateLibrary
from hostagent.domain_xml.templates import PACKAGED
from hostagent.errors import HostAgentError
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.limits.cgroups import kernel_lacks_quotas, own_mountinfo
from hostagent.mechanisms.accelerator import probe_accelerator
from hostagent.operations.agent import Agent
from hostagent.options import HostAgentOptions, address_of, own_capacity, url_of
from hostagent.service import give_back, serve
from hostagent.state.files import alone_to_the_end_in, make_parents
from hostagent.state.host_boot import HostBoot
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice

#: Measured under emulation with the capped translation cache; with KVM there is none (docs/internals/contracts.md,
#: accounting).
OVERHEAD_MIB = {"qemu": 320.0, "kvm": 160.0}

log = structlog.get_logger()


def run(given: Given[HostAgentOptions], access: AccessSettings, releases: bool) -> None:
    """Serve until a signal asks to stop, or give back what was taken and end.

    :raises HostAgentError, AccessError, OSError, ValueError: it cannot be.
    """
    make_parents(given.options.state_dir)  # the disks may lie beside it
    asyncio.run(_release(given.options, access) if releases else _serve(given, access))


async def _serve(given: Given[HostAgentOptions], access: AccessSettings) -> None:
    options = given.options
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    address, port = address_of(options.listen)
    alone_to_the_end_in(options.state_dir)
    async with exporting(options.tracing, "ebb-hostagent", host=options.id):
        await serve(
            await _agent(options, access),
            address.strip("[]"),
            port,
            options.token_file,
            options.manager or None,
            options.manager_token_file,
            stop,
            access,
            options.manager_name,
            given,
        )


async def _release(options: HostAgentOptions, access: AccessSettings) -> None:
    """:raises HostAgentError: something is left, or an agent runs here already."""
    if not (options.state_dir / "state.json").exists():
        print(f"{options.state_dir} is no agent's: nothing was taken from any VM")
        return
    address, port = address_of(options.listen)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((address.strip("[]"), port))
        except OSError as error:
            # Nobody listens at an address that this machine does not have any more.
            if error.errno == errno.EADDRINUSE:
                raise HostAgentError(
                    f"an agent runs at {options.listen}: stop it first, or `ebb host undeflate`"
                ) from error
    alone_to_the_end_in(options.state_dir)
    print(await give_back(await _agent(options, access)))


async def _agent(options: HostAgentOptions, access: AccessSettings) -> Agent:
    kind, reason = await asyncio.to_thread(_accelerator, options)
    template_dirs = (*options.templates, PACKAGED)
    library = await asyncio.to_thread(TemplateLibrary.load, template_dirs, 0)
    settings = LibvirtSettings(
        host_id=options.id,
        uri=options.uri,
        accelerator=kind,
        image_dir=options.image_dir,
        disk_dir=options.disk_dir,
        template_dirs=template_dirs,
        acpi_verdict=options.acpi_verdict,
        library=library,
        image_prefixes=options.image_prefix,
        save_dir=options.save_dir,
        adopted=options.state_dir / "adopted.json",
        migration_uri=options.migration_uri,
        migration_listen=options.migration_listen,
        migration_emulated=options.migration_emulated,
        cold_first=options.cold_first,
    )
    overhead, emulated = (
        OVERHEAD_MIB[one] if options.overhead_mib is None else options.overhead_mib for one in (kind, "qemu")
    )
    url = url_of(options, access.scheme)
    capacity = own_capacity(options.reserve_mib) if options.capacity == "auto" else capacity_of(options.capacity)
    part = Slice(options.id, url, capacity, kind, overhead, options.reserve_mib, emulated)
    directories = {"state": options.state_dir, "disks": options.disk_dir, "saved": options.save_dir}
    journal = await asyncio.to_thread(Journal, options.state_dir, bool(options.manager))
    boot = await asyncio.to_thread(HostBoot.read)
    host = Host(part, LibvirtHypervisor(settings), journal, directories=directories, boot=boot)
    if why := kernel_lacks_quotas(own_mountinfo()):
        log.warning("VMs cannot be held to their size of CPU on this host", why=why)
    log.info("starting", host=options.id, capacity=str(capacity), accelerator=kind, why=reason)
    return Agent(host, usable_boot_mib)


def _accelerator(options: HostAgentOptions) -> tuple[Any, str]:
    if options.accelerator != "auto":
        return options.accelerator, "as configured"
    image = options.image_dir
    found = probe_accelerator(image / "vmlinuz", None, options.state_dir / "accelerator.json")
    if found.kind == "qemu":
        log.warning("VMs are emulated, and take twice the memory beside their own", why=found.reason)
    return found.kind, found.reason

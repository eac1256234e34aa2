"""The command ``ebb-hostagent``."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError

from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Address
from ebbtide.rest.access import Rates
from ebbtide.rest.errors import AccessError
from ebbtide.rest.rates import Rate
from ebbtide.rest.settings import AccessSettings, add_options, is_protected, key_pair, settings_of
from hostagent.domain_xml.template_library import TemplateLibrary
from hostagent.domain_xml.templates import PACKAGED
from hostagent.errors import HostAgentError
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.mechanisms.accelerator import probe_accelerator
from hostagent.mechanisms.host_facts import ACPI_VERDICT
from hostagent.operations.agent import Agent
from hostagent.service import MANAGER_NAME, configure_logs, serve
from hostagent.state.files import make_parents
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice

EXAMPLE = """\
example:
  ebb-hostagent --id host-a --capacity cpu_cores=6,memory_mib=4096 \\
      --token-file /etc/ebbtide/host-a.command-token \\
      --manager http://127.0.0.1:7100 --manager-token-file /etc/ebbtide/host-a.report-token
  both tokens: `ebb invite host-a`, at the manager
  beyond loopback, with TLS: docs/reference/security.md

The agent manages only domains that it made itself or was told to adopt; it knows them by the intent in their libvirt
metadata. Ended or killed, it leaves them as they are, and resumes what was unfinished when it is started again.
"""
#: Measured under emulation with the capped translation cache; with KVM there is none (docs/internals/contracts.md,
#: accounting).
OVERHEAD_MIB = {"qemu": 320.0, "kvm": 160.0}
#: Most calls are the manager's, which acts for all users.
RATES = Rates(people=Rate(200.0, 1000.0))

log = structlog.get_logger()


def main() -> None:
    """Run the agent until SIGTERM or SIGINT."""
    # Stores, journals and logs are for their owner.
    os.umask(0o077)
    arguments = _parser().parse_args()
    configure_logs(arguments.log_json, arguments.verbose)
    try:
        access = _access(arguments)
        make_parents(arguments.state_dir)  # the disks may lie beside it
        asyncio.run(_serve(arguments, access))
    except (HostAgentError, AccessError, OSError, ValueError) as error:
        sys.exit(f"ebb-hostagent: {error}")


async def _serve(arguments: argparse.Namespace, access: AccessSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    address, port = arguments.listen
    kind, reason = await asyncio.to_thread(_accelerator, arguments)
    directories = (*arguments.templates, PACKAGED)
    library = await asyncio.to_thread(TemplateLibrary.load, directories, 0)
    settings = LibvirtSettings(
        host_id=arguments.id,
        uri=arguments.uri,
        accelerator=kind,
        image_dir=arguments.image_dir,
        disk_dir=arguments.disk_dir,
        template_dirs=directories,
        acpi_verdict=arguments.acpi_verdict,
        library=library,
        image_prefixes=tuple(arguments.image_prefix),
        adopted=arguments.state_dir / "adopted.json",
    )
    overhead = OVERHEAD_MIB[kind] if arguments.overhead_mib is None else arguments.overhead_mib
    url = arguments.url or f"{access.scheme}://{address}:{port}"
    try:
        TypeAdapter(Address).validate_python(url)
    except ValidationError:
        raise AccessError(f"--url {url} must be a scheme, a host and a port, nothing else") from None
    part = Slice(arguments.id, url, arguments.capacity, kind, overhead, arguments.reserve_mib)
    host = Host(part, LibvirtHypervisor(settings), await asyncio.to_thread(Journal, arguments.state_dir))
    log.info("starting", host=arguments.id, capacity=str(arguments.capacity), accelerator=kind, why=reason)
    await serve(
        Agent(host, usable_boot_mib),
        address.strip("[]"),
        port,
        arguments.token_file,
        arguments.manager,
        arguments.manager_token_file,
        stop,
        access,
        arguments.manager_name,
    )


def _access(arguments: argparse.Namespace) -> AccessSettings:
    """:raises AccessError: options that contradict each other."""
    address, _ = arguments.listen
    settings = settings_of(arguments, address)
    caller = key_pair(arguments.certificate, arguments.key, "--certificate and --key")
    if arguments.url is None and address.strip("[]") in ("0.0.0.0", "::"):
        raise AccessError(f"--listen {address} is no address that the manager could call: give --url")
    secret = caller is not None or arguments.manager_ca is not None
    if secret and not all(url.startswith("https://") for url in arguments.manager or ()):
        raise AccessError("--manager must begin with https:// where --manager-ca or --certificate is given")
    for url in arguments.manager or ():
        if not is_protected(url):
            raise AccessError(f"--manager {url} would get the token over plain HTTP: give https://")
    if arguments.manager and arguments.manager_token_file is None:
        raise AccessError("--manager needs --manager-token-file: a host has a token for each direction (`ebb invite`)")
    return replace(settings, server_ca=arguments.manager_ca, caller=caller)


def _accelerator(arguments: argparse.Namespace) -> tuple[Any, str]:
    if arguments.accelerator != "auto":
        return arguments.accelerator, "as configured"
    image = arguments.image_dir
    found = probe_accelerator(image / "vmlinuz", None, arguments.state_dir / "accelerator.json")
    return found.kind, found.reason


def _capacity(text: str) -> ResourceVector:
    try:
        pairs = (part.split("=", 1) for part in text.split(","))
        capacity = ResourceVector.of({name.strip(): float(value) for name, value in pairs})
    except InvalidField as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like cpu_cores=6,memory_mib=4096") from error
    return capacity


def _listen(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 127.0.0.1:7101")
    return address, int(port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ebb-hostagent",
        description="Deflates and reinflates the VMs of one KVM host.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    state = Path("/var/lib/ebbtide")
    add = parser.add_argument
    add("--id", required=True, help="this host's name in the cluster: lower-case letters, digits, hyphens")
    add("--capacity", required=True, type=_capacity, help="the slice of this machine to hand out")
    add("--token-file", required=True, type=Path, help="what the manager carries towards this API")
    add("--listen", type=_listen, default=("127.0.0.1", 7101), metavar="ADDRESS:PORT", help="default 127.0.0.1:7101")
    add(
        "--manager", action="append", metavar="URL",
        help="base URL of the manager, given again for each standby; without it the agent serves its API only",
    )  # fmt: skip
    add("--manager-token-file", type=Path, help="what we carry towards the manager")
    add("--manager-ca", type=Path, metavar="FILE", help="PEM: CA of an HTTPS manager; default: --client-ca")
    add("--certificate", type=Path, metavar="FILE", help="PEM, shown to the manager; default: --tls-certificate")
    add("--key", type=Path, metavar="FILE", help="PEM, the key of --certificate")
    add("--manager-name", default=MANAGER_NAME, help="common name of the manager's certificate, default %(default)s")
    add("--url", help="where the manager finds this API; default: as in --listen")
    add("--state-dir", type=Path, default=state / "agent", help=f"default {state}/agent")
    add("--image-dir", type=Path, default=state / "image", help="holds base.qcow2, vmlinuz, initrd")
    add("--disk-dir", type=Path, default=state / "disks", help=f"default {state}/disks")
    add("--templates", type=Path, action="append", default=[], help="directory of root's with templates NAME.xml")
    add(
        "--image-prefix",
        type=Path,
        action="append",
        default=[],
        help="directory below which the files of XML in a request must lie; without it no XML is taken",
    )
    add("--uri", default="qemu:///system", help="libvirt connection, default qemu:///system")
    add("--accelerator", choices=("auto", "kvm", "qemu"), default="auto", help="default: found by booting a kernel")
    add(
        "--acpi-verdict",
        type=Path,
        default=ACPI_VERDICT,
        help="what `ebb doctor --probe-acpi` found; without it no vCPU is unplugged",
    )
    add("--overhead-mib", type=float, help="memory a VM costs besides its size; default by accelerator")
    add("--reserve-mib", type=float, default=512.0, help="host memory never handed out, default 512")
    add_options(parser, RATES)
    add("--log-json", action="store_true", help="log lines as JSON")
    add("--verbose", action="store_true", help="log every step")
    return parser


if __name__ == "__main__":
    main()

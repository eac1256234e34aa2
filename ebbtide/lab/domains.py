"""Removes the domains that the lab's agents left in libvirt: those with our name and our owner, never another."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from ebbtide.lab.errors import LabError
from ebbtide.lab.services import open_libvirt
from hostagent.libvirt.hypervisor import domain_name
from hostagent.state import intents

RUN = Path("/run/libvirt/qemu")
LOGS = Path("/var/log/libvirt/qemu")
DEFINITIONS = Path("/etc/libvirt/qemu")
REMOVE_S = 30.0
#: How often a libvirtd that ended in the middle is brought back before it is given up.
REVIVALS = 3


class _LibvirtGone(LabError):
    """libvirtd has ended, or hung up."""


def domains_of(uri: str, host_ids: Iterable[str]) -> list[str]:
    """Names of the domains whose owner is one of these hosts, or that are called as theirs are.

    Raises LabError when libvirt does not say.
    """
    import libvirt

    hosts, connection = list(host_ids), open_libvirt(uri)
    try:
        return sorted(
            domain.name()
            for domain in connection.listAllDomains()
            if _owner(domain) in hosts or any(domain.name().startswith(domain_name(host, "")) for host in hosts)
        )
    except libvirt.libvirtError as error:
        raise LabError(f"libvirt does not say which domains there are: {error}") from error
    finally:
        with contextlib.suppress(libvirt.libvirtError):
            connection.close()


def adopted_by(uri: str, noted: Mapping[str, Set[str] | None]) -> list[str]:
    """Names of the VMs that these hosts have adopted, each with that of its domain.

    A copy that somebody has made of a domain of ours has our metadata, too, and is none.

    :param noted: domains that each host's agent has noted as adopted; None: it has noted nothing yet.
    :raises LabError: libvirt does not say.
    """
    import libvirt

    connection = open_libvirt(uri)
    try:
        return sorted(
            f"{intent.spec.name} (domain {name})"
            for domain in connection.listAllDomains()
            if (intent := _intent(domain)) is not None and intent.adopted is not None and intent.owner in noted
            for name in [domain.name()]
            if (names := noted[intent.owner]) is None or name in names
        )
    except libvirt.libvirtError as error:
        raise LabError(f"libvirt does not say which domains were adopted: {error}") from error
    finally:
        with contextlib.suppress(libvirt.libvirtError):
            connection.close()


def remove_domains(
    uri: str,
    host_ids: Iterable[str] | None,
    report: Callable[[str], None],
    revive: Callable[[], None] | None = None,
) -> list[str]:
    """Destroy and undefine the domains of these hosts; returns their names.

    A domain is one of ours if its name begins with ``ebb-HOST.`` and its metadata names HOST as the owner; one that has
    only the name is left and reported. Raises LabError when libvirt refuses.

    :param host_ids: None: all domains, whoever owns them.
    :param revive: makes libvirt answer again where it has ended meanwhile, so that no domain is left without it.
    """
    hosts, removed = None if host_ids is None else list(host_ids), list[str]()
    for attempt in range(1, REVIVALS + 1):
        try:
            _remove_all(uri, hosts, report, removed)
            break
        except _LibvirtGone as error:
            if revive is None or attempt == REVIVALS:
                raise
            report(f"libvirt went away while domains were being removed, and is brought back: {error}")
            revive()
    return removed


def _remove_all(uri: str, host_ids: list[str] | None, report: Callable[[str], None], removed: list[str]) -> None:
    """Adds the names of those that are gone to ``removed``, also where it raises."""
    import libvirt

    try:
        connection = open_libvirt(uri)
    except LabError as error:
        raise _LibvirtGone(str(error)) from error
    try:
        for domain in connection.listAllDomains():
            name = domain.name()
            if host_ids is not None and not _is_of(domain, name, host_ids, report):
                continue
            report(f"removing {name}")
            _remove(connection, domain.UUIDString(), name)
            removed.append(name)
    except libvirt.libvirtError as error:
        if _is_gone(error):
            raise _LibvirtGone(str(error)) from error
        raise LabError(f"the domains could not be removed: {error}") from error
    finally:
        with contextlib.suppress(libvirt.libvirtError):
            connection.close()


def _is_of(domain: Any, name: str, host_ids: list[str], report: Callable[[str], None]) -> bool:
    hosts = [host for host in host_ids if name.startswith(domain_name(host, ""))]
    owner = _owner(domain) if hosts else None
    if hosts and owner not in hosts:
        report(f"{name} is left alone: its owner is {owner or 'not known'}")
    return owner in hosts


def _is_gone(error: Any) -> bool:
    """Whether a call ended because its libvirtd did: then the error is one of the connection, not of the driver."""
    import libvirt

    return error.get_error_domain() == libvirt.VIR_FROM_RPC or error.get_error_code() in (
        libvirt.VIR_ERR_NO_CONNECT,
        libvirt.VIR_ERR_INVALID_CONN,
    )


def _remove(connection: Any, uuid: str, name: str) -> None:
    """Repeat until libvirt knows it no more: a libvirtd that was just started still finds out which domains run."""
    import libvirt

    # A VM that was suspended has a saved image.
    flags = libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    problem = "it is still there"
    deadline_s = time.monotonic() + REMOVE_S
    while time.monotonic() < deadline_s:
        try:
            domain = connection.lookupByUUIDString(uuid)
            if domain.isActive():
                domain.destroy()
            if domain.isPersistent():
                domain.undefineFlags(flags | _of_checkpoints(domain))
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                return
            if _is_gone(error):
                raise
            if error.get_error_code() != libvirt.VIR_ERR_OPERATION_INVALID:
                raise LabError(f"{name} could not be removed: {error}") from error
            problem = str(error)
        time.sleep(0.2)
    raise LabError(f"{name} could not be removed within {REMOVE_S:g} s: {problem}")


def _of_checkpoints(domain: Any) -> int:
    """The flag for those that a backup has left; drivers that have none refuse it."""
    import libvirt

    try:
        return int(libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA) if domain.listAllCheckpoints() else 0
    except libvirt.libvirtError:
        return 0


def domains_left(host_ids: Iterable[str] | None, run: Path = RUN, definitions: Path = DEFINITIONS) -> bool:
    """Whether anything of these hosts is left though libvirtd does not answer: QEMU processes, by libvirtd's pid files,
    or definitions, which a later lab would take for VMs of another manager.

    :param host_ids: None: processes of any; their libvirt's folders go with the lab.
    """
    if host_ids is None:
        return any(run.glob("*.pid"))
    return any(
        any(run.glob(domain_name(host, "*.pid"))) or any(definitions.glob(domain_name(host, "*.xml")))
        for host in host_ids
    )


def remove_logs(host_ids: Iterable[str], logs: Path = LOGS) -> None:
    """Remove the logs that libvirt wrote about the domains of these hosts."""
    for host in host_ids:
        pattern = re.compile(re.escape(domain_name(host, "")) + r"[a-z0-9-]+\.log(\.\d+)?")
        for path in logs.glob(domain_name(host, "*.log*")):
            if pattern.fullmatch(path.name):
                path.unlink(missing_ok=True)


def _owner(domain: Any) -> str | None:
    intent = _intent(domain)
    return None if intent is None else intent.owner


def _intent(domain: Any) -> intents.Intent | None:
    import libvirt

    for flags in (libvirt.VIR_DOMAIN_AFFECT_CONFIG, libvirt.VIR_DOMAIN_AFFECT_LIVE):
        try:
            text = domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, intents.NAMESPACE, flags)
        except libvirt.libvirtError:
            continue
        intent = intents.from_element(text)
        if intent is not None:
            return intent
    return None

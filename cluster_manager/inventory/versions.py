"""Versions of VMs and hosts: what clients name in ``If-Match``, the same after a restart of the manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cluster_manager.errors import RequestError
from cluster_manager.store.rows import StoredVM, stored_labels
from ebbtide.messages.hosts import HostReport
from ebbtide.rest.versions import digest_of

#: Refuses a change that was meant for another version of a VM.
Precondition = Callable[[StoredVM], None]


def vm_version(row: StoredVM) -> str:
    """Differs when what a client can set does: the request that made or deletes it, spec, phase, place, generation."""
    spec = row.spec.model_dump_json()
    labels = (stored_labels(row.labels),) if row.labels else ()
    return digest_of(row.name, row.request_id, spec, row.phase.value, row.host or "", str(row.generation), *labels)


def host_version(report: HostReport) -> str:
    """Differs when a host's address, capacity or mode does."""
    return digest_of(report.id, report.url, report.capacity.model_dump_json(), report.mode.value, report.mode_reason)


def only(versions: frozenset[str] | None) -> Precondition:
    """The precondition of an ``If-Match``; None allows any.

    :raises RequestError: (the precondition) 412, and nothing has been changed.
    """

    def check(row: StoredVM) -> None:
        if versions is not None and (now := vm_version(row)) not in versions:
            raise RequestError(412, f"{row.name} has version {now} by now: look at it again", "If-Match")

    return check


ANY_VERSION: Final = only(None)

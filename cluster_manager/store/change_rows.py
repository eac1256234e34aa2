"""Rows of core changes: when each was, and what the store knows of its machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from cluster_manager.plans.plans import VMPhase
from cluster_manager.store import schema
from ebbtide.deflation.allocations import Priority
from ebbtide.messages.machines import CoreChange

#: A VM whose cores fall to 0 while it is in one of these was stopped by its owner.
_BY_OWNER: Final = tuple(phase.value for phase in (VMPhase.STOPPING, VMPhase.STOPPED, VMPhase.MIGRATING))
#: By how much hosts' clocks may differ, seconds. A change from further ahead is dated back to here: what comes after it
#: would be older than the last that is known, and passed over.
CLOCKS_S: Final = 60.0
#: No clock that is set right goes back so far, seconds: none is wrong by more than a time zone, but one that has begun
#: at 1970.
_BACK_S: Final = 86_400.0
#: A last change that is dated further ahead than this was dated by a manager's clock that was wrong for a while; what
#: comes after it is not dated by it. Earlier versions dated changes up to so far ahead.
_AHEAD_S: Final = 3600.0


def dated(changes: Iterable[CoreChange], last: float | None, now: float) -> list[float]:
    """When each change was that a host tells of now, in the order in which they happened.

    That order is right whatever the host's clock says. Where it was ahead and is set right, the first changes after
    that count as of the last one before; where it is days behind, they count as of now.

    :param last: when its last one before these was, if there was one.
    """
    found = []
    if last is not None and last > now + _AHEAD_S:
        last = None
    for change in changes:
        at = min(change.at, now + CLOCKS_S)
        if last is not None and at < last:
            at = last if last - at <= _BACK_S else max(last, now)
        found.append(at)
        last = at
    return found


async def last_date(connection: AsyncConnection, host: str) -> float | None:
    """When the last core change of a host was; None if it has none."""
    table = schema.core_changes
    last = select(table.c.at).where(table.c.host == host).order_by(table.c.sequence.desc()).limit(1)
    found: float | None = (await connection.execute(last)).scalar_one_or_none()
    return found


def change_row(host: str, change: CoreChange, at: float, vm: Any, given_up: bool) -> dict[str, Any]:
    """The row of a core change, with what the newest row of its VM says of it.

    :param at: when it was.
    :param given_up: whether its owner had the VM given back or deleted by this very change.
    """
    owners = given_up or (vm is not None and (bool(vm.deleted_by_owner) or vm.phase in _BY_OWNER))
    return {
        **change.model_dump(),
        "at": at,
        "host": host,
        "variable": int(vm is None or vm.priority != Priority.FIXED.value),
        "by_owner": int(owners and change.cores_after == 0),
    }


async def lost_cores(
    connection: AsyncConnection, host: str, vms: Sequence[str], seen_at: float
) -> list[dict[str, Any]]:
    """Rows of core changes for a host's VMs that are gone with it, from when it was last heard of: nobody says when
    they lost their cores, only that these were not taken away.
    """
    table = schema.core_changes
    highest = select(func.coalesce(func.max(table.c.sequence), 0)).where(table.c.host == host)
    sequence, rows = int((await connection.execute(highest)).scalar_one()), []
    for vm in vms:
        last = select(table).where(table.c.machine == vm).order_by(table.c.at.desc(), table.c.sequence.desc()).limit(1)
        found = (await connection.execute(last)).one_or_none()
        if found is None or found.cores_after == 0:
            continue
        sequence += 1
        change = {"cores_before": found.cores_after, "cores_after": 0.0, "variable": found.variable, "by_owner": 1}
        where = {"host": host, "sequence": sequence, "machine": vm, "at": max(seen_at, found.at)}
        rows.append({**change, **where, "cause": f"{host} is forgotten"})
    return rows

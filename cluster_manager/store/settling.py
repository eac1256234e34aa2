"""What a store of a backup must be before a manager goes on from it, among hosts which have gone on without it.

Whatever was under way when the backup was made has come to some end since: a plan that went on from its record could
delete a VM that has been made anew. So plans under way end here, removals that were owed are owed no more, and what
really runs is for the hosts to say. Invitations are void, and who was revoked stays so. The epoch rises by more than
managers will have begun to lead since, so that the agents follow this manager and refuse one of before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, delete, func, insert, select, update

from cluster_manager.plans.plans import VMPhase, finish
from cluster_manager.store import schema
from cluster_manager.store.enrolled import NAME, NOBODY, Enrolled, read_enrolled, restored
from cluster_manager.store.rows import phase_of, stored_plan
from cluster_manager.store.store import plan_columns
from cluster_manager.store.transactions import SERVER_HISTORY
from ebbtide.deflation.fencing import MOST_STEP
from ebbtide.messages.explanations import EventKind
from ebbtide.messages.operations import OperationState

#: By how much the epoch rises at least: managers begin to lead less often than this between a backup and its use.
EPOCHS: Final = 10_000
#: And once more in so many seconds since the backup: of its uses the later one is above the earlier one, on which
#: managers have begun to lead, but less often than this.
EPOCH_S: Final = 60.0
#: So much at the most. It is far less than what agents take for implausible, those among them that follow nobody yet: a
#: store can be restored twenty times in its life.
MOST_EPOCHS: Final = MOST_STEP // 20
EVENT: Final[EventKind] = "restored"
BUSY: Final = frozenset(
    {VMPhase.PLACING, VMPhase.DELETING, VMPhase.STOPPING, VMPhase.STARTING, VMPhase.MIGRATING},
)


@dataclass(frozen=True, slots=True)
class Settled:
    """What a restored store holds.

    :param epoch: that of the backup; the manager goes on above ``epoch_now``.
    :param ended: a sentence for each plan that was under way, and for each removal that was owed.
    :param revoked: the hosts that are.
    """

    epoch: int
    epoch_now: int
    hosts: int
    vms: int
    ended: tuple[str, ...]
    revoked: tuple[str, ...] = ()


def settled_phase(phase: VMPhase, on_a_host: bool, waited: bool) -> VMPhase:
    """Where a VM stands once the plan that was at work on it has ended without a word.

    Of one that is ``running`` its host's report says whether it runs, is off, or is not there.

    :param waited: it was off for lack of room. It waits on, unless somebody wanted it otherwise.
    """
    if phase not in BUSY:
        return phase
    if not on_a_host:
        return VMPhase.FAILED
    if not waited:
        return VMPhase.RUNNING
    return VMPhase.PREEMPTED if phase is VMPhase.STARTING else VMPhase.STOPPED


def rise(age_s: float) -> int:
    """By how much the epoch rises with a backup that is so many seconds old."""
    return min(EPOCHS + int(max(age_s, 0.0) // EPOCH_S), MOST_EPOCHS)


def settle(connection: Connection, now: float, other_epoch: int = 0, stood: Enrolled = NOBODY) -> Settled:
    """Have a store of a backup be one from which a manager can go on; in the caller's transaction.

    :param now: seconds since the epoch.
    :param other_epoch: that of the store in whose place it comes; 0: not known.
    :param stood: who was revoked by that store.
    :raises StoreError: what it holds of enrolled hosts is damaged.
    """
    enrolled = _enrolled(connection, stood)
    newest = _newest(connection)
    counters, plans, vms, hosts = schema.counters, schema.plans, schema.vms, schema.hosts
    ended: list[tuple[str | None, str | None, str]] = []
    for plan in map(stored_plan, connection.execute(select(plans).where(plans.c.finished == 0))):
        said = f"{plan.state.kind} was under way when the store was backed up: what came of it is not known"
        end = finish(plan.state, OperationState.FAILED, said).state
        connection.execute(update(plans).where(plans.c.id == end.id).values(**plan_columns(end, now)))
        ended.append((end.vm, end.host, f"{end.vm or end.host or end.id}: {said}"))
    for row in connection.execute(select(vms).where(schema.LIVING)).all():
        before = phase_of(row)
        after = settled_phase(before, row.host is not None, row.preempted_at is not None)
        changes: dict[str, Any] = {}
        if after is not before:
            changes = {"phase": after.value, "deleted_by_owner": 0}
            changes["sentence"] = f"was {before} when the store was backed up, with which this manager went on"
            if after is not VMPhase.PREEMPTED:
                changes |= {"preempted_at": None, "preemption_reason": None, "preemption_unsure": 0}
        if row.owes_removal:
            said = f"was to be removed from {row.host} when the store was backed up; if it is there still, delete it"
            changes |= {"owes_removal": 0, "sentence": said}
            ended.append((row.name, row.host, f"{row.name}: {said}"))
        if changes:
            connection.execute(update(vms).where(vms.c.id == row.id).values(**changes))
    # It goes on above whatever its server has lost.
    connection.execute(delete(schema.knowledge).where(schema.knowledge.c.name == SERVER_HISTORY))
    # Plans that ended here may have left VMs smaller than they need be.
    connection.execute(update(hosts).values(owes_reinflation=1))
    epoch = int(connection.execute(select(counters.c.value).where(counters.c.name == "epoch")).scalar_one())
    epoch_now = max(epoch, other_epoch) + rise(now - newest)
    connection.execute(update(counters).where(counters.c.name == "epoch").values(value=epoch_now))
    whole = f"restored from a backup of epoch {epoch}, to go on above {epoch_now}; ended by that: {len(ended)}"
    rows = [{"vm": vm, "host": host, "sentence": said} for vm, host, said in ended]
    for event in (*rows, {"vm": None, "host": None, "sentence": whole}):
        connection.execute(insert(schema.events).values(at=now, plan=None, kind=EVENT, **event))
    living = len(connection.execute(select(vms.c.id).where(schema.LIVING)).all())
    known = len(connection.execute(select(hosts.c.id)).all())
    revoked = tuple(sorted(enrolled.revoked))
    return Settled(epoch, epoch_now, known, living, tuple(said for _, _, said in ended), revoked)


def _newest(connection: Connection) -> float:
    """The last moment that the store knows of, seconds since the epoch: it was backed up soon after."""
    last = (func.max(schema.terms.c.begun_at), func.max(schema.hosts.c.seen_at), func.max(schema.events.c.at))
    found = [connection.execute(select(moment)).scalar_one() for moment in last]
    return max((float(moment) for moment in found if moment is not None), default=0.0)


def _enrolled(connection: Connection, before: Enrolled) -> Enrolled:
    table = schema.knowledge
    of_name = table.c.name == NAME
    body = connection.execute(select(table.c.body).where(of_name)).scalar_one_or_none()
    now = restored(read_enrolled(body), before)
    if body is None:
        connection.execute(insert(table).values(name=NAME, saved_at=0.0, body=now.model_dump_json()))
    else:
        connection.execute(update(table).where(of_name).values(body=now.model_dump_json()))
    return now

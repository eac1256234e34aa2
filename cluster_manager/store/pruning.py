"""Rows that the store may forget: old events, finished plans, ended VMs, ended tasks and core changes, a few at a time.

Never: plans under way, VMs that may still be on a host or that a silent host may yet speak of, the newest of a kind,
and events by which the acquirer goes on.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Delete, delete, exists, func, or_, select, tuple_

from cluster_manager.defaults import Retention
from cluster_manager.plans.plans import VMPhase
from cluster_manager.store.schema import LIVING, core_changes, events, hosts, plans, tasks, terms, vms
from ebbtide.deflation.allocations import Priority
from ebbtide.messages.explanations import EventKind

#: Kinds of events by which the acquirer goes on: a period has ended; a machine leaves; it was placed since.
LOOKED: Final[EventKind] = "acquirer-looked"
DECOMMISSIONED: Final[EventKind] = "acquirer-decommissioned"
PLACED: Final[EventKind] = "placed"


def statements(retention: Retention, now: float) -> dict[str, Delete]:
    """One batch of each kind, in the order in which they refer to each other.

    :param now: seconds since the epoch.
    """
    old, batch = now - retention.age_s, retention.batch
    newest = select(func.max(events.c.id)).scalar_subquery()
    forgotten = or_(events.c.at < old, events.c.id <= newest - retention.most_events)
    look = select(func.max(events.c.id)).where(events.c.kind == LOOKED).scalar_subquery()
    of_machine = select(func.max(events.c.id)).where(
        events.c.vm == vms.c.name, events.c.kind.in_((DECOMMISSIONED, PLACED))
    )
    # Harvest VMs are few, and found by an index.
    words = select(func.coalesce(of_machine.correlate(vms).scalar_subquery(), 0)).where(
        vms.c.priority == Priority.HARVEST.value, vms.c.acquired == 1, LIVING
    )
    read = or_(events.c.id == func.coalesce(look, 0), events.c.id.in_(words))
    old_events = select(events.c.id).where(forgotten, events.c.id < newest, ~read).order_by(events.c.id).limit(batch)

    told = exists().where(events.c.plan == plans.c.id)
    last_plan = select(func.max(plans.c.number)).scalar_subquery()
    old_plans = (
        select(plans.c.id)
        .where(plans.c.updated_at < old, plans.c.finished == 1, plans.c.number < last_plan, ~told)
        .order_by(plans.c.updated_at)
        .limit(batch)
    )

    # A host that has not been heard of since then may hold the VM, and core changes of it.
    heard_of = or_(vms.c.host.is_(None), ~exists().where(hosts.c.id == vms.c.host, hosts.c.seen_at < vms.c.ended_at))
    old_vms = (
        select(vms.c.id)
        .where(vms.c.phase == VMPhase.ENDED.value, vms.c.ended_at < old, vms.c.owes_removal == 0, heard_of)
        .order_by(vms.c.ended_at)
        .limit(batch)
    )
    last_task = select(func.max(tasks.c.number)).scalar_subquery()
    old_tasks = (
        select(tasks.c.name)
        .where(tasks.c.updated_at < old, tasks.c.finished == 1, tasks.c.number < last_task)
        .order_by(tasks.c.updated_at)
        .limit(batch)
    )
    return {
        "events": delete(events).where(events.c.id.in_(old_events)),
        "plans": delete(plans).where(plans.c.id.in_(old_plans)),
        "vms": delete(vms).where(vms.c.id.in_(old_vms)),
        "core changes": _old_changes(old, batch),
        "tasks": delete(tasks).where(tasks.c.name.in_(old_tasks)),
        # Not the last of an address: hosts are refused certificates for those of managers.
        "terms": delete(terms).where(
            terms.c.begun_at < old, terms.c.epoch.not_in(select(func.max(terms.c.epoch)).group_by(terms.c.url))
        ),
    }


def _old_changes(old: float, batch: int) -> Delete:
    """Not the last of a host, by which its sequence goes on, nor the last of a living VM, which says what it has."""
    later, other = core_changes.alias("later"), core_changes.alias("other")
    later_of_host = exists().where(later.c.host == core_changes.c.host, later.c.sequence > core_changes.c.sequence)
    later_of_machine = exists().where(other.c.machine == core_changes.c.machine, other.c.at > core_changes.c.at)
    lives = exists().where(vms.c.name == core_changes.c.machine, vms.c.phase != VMPhase.ENDED.value)
    rows = (
        select(core_changes.c.host, core_changes.c.sequence)
        .where(core_changes.c.at < old, later_of_host, or_(later_of_machine, ~lives))
        .order_by(core_changes.c.at)
        .limit(batch)
    )
    # Not by EXISTS, for which SQLite reads the whole table.
    return delete(core_changes).where(tuple_(core_changes.c.host, core_changes.c.sequence).in_(rows))

"""Which domain a VM is, and what becomes of a domain of ours that no VM belongs to. Pure.

Definitions are backed up, put back and copied, and snapshots are reverted to: an intent may be one of long ago.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum, auto

from hostagent.libvirt.hypervisor import DomainState, domain_name
from hostagent.state.intents import Intent, Phase


class Fate(Enum):
    """Of such a domain."""

    #: It is looked after again, with its disk: libvirt did not name it for a while.
    TAKEN_BACK = auto()
    #: Left as it is, and told of: another domain is looked after as the VM of its name.
    LEFT = auto()
    #: It moves: once it runs here it runs nowhere else.
    AWAITED = auto()
    #: Its owner gets it back.
    GIVEN_BACK = auto()
    #: It goes with its disk: it is left of a creation or move that has failed, or of a deletion that was not finished.
    REMOVED = auto()


def fate(intent: Intent, state: str, failed: bool, name_taken: bool, ended: bool = False) -> Fate:
    """Only what is known to be left over is removed; never what has another owner, nor beside the VM that it may be of.

    :param state: of the domain.
    :param failed: whether the intent's operation was answered as failed: then it is not carried out.
    :param name_taken: whether there is a VM of its name, or it is only a copy of one (`is_copy`).
    :param ended: whether the domain was put back after that operation had come to its end (`put_back`).
    """
    kind = intent.cause.kind if intent.cause is not None else ""
    moves = intent.phase is Phase.ARRIVING
    if intent.adopted is not None and failed and kind == "adopt":
        return Fate.GIVEN_BACK
    if name_taken:
        return Fate.LEFT
    if intent.adopted is None:
        never_came = failed and (intent.phase is Phase.CREATING or (moves and state == "stopped"))
        deleted = intent.phase is Phase.DELETING and not ended and not (failed and kind == "delete")
        if never_came or deleted:
            return Fate.REMOVED
    return Fate.AWAITED if moves and state != "running" else Fate.TAKEN_BACK


def put_back(intent: Intent, deleted: Collection[str], carried_out: Collection[str]) -> bool:
    """Whether a domain is here again as it was before its stop or deletion came to its end, from a backup or snapshot.

    :param deleted: request ids of deletions that have begun.
    :param carried_out: those of stops and deletions that have come to their end.
    """
    cause = intent.cause
    if cause is None or cause.kind not in ("stop", "delete"):
        return False
    if cause.kind == "stop":
        return intent.phase is Phase.STOPPING and cause.request_id in carried_out
    # Nothing is done to a domain before its intent says DELETING.
    began = cause.request_id in deleted and intent.phase is not Phase.DELETING
    return began or cause.request_id in carried_out


def is_copy(domain: DomainState) -> bool:
    """Whether a domain is the clone of a VM that was made here, or its copy under another name.

    It is not that VM once that is gone either: whoever has removed the one has not asked for the end of the other.
    """
    intent = domain.intent
    renamed = domain.name != domain_name(intent.owner, intent.spec.name)
    return intent.adopted is None and domain.original is False and renamed


def told_apart(found: Iterable[DomainState]) -> list[DomainState]:
    """Of each VM the one domain that it is, where others bear its intent, too: clones, and copies that were put back.

    One that was released is none. A copy is told by its UUID, where the intent says in which one it was written. Else
    it is the one that runs, then the one that has the VM's name.
    """
    of_name: dict[str, list[DomainState]] = {}
    for domain in found:
        if not is_copy(domain):
            of_name.setdefault(domain.intent.spec.name, []).append(domain)
    return [min(same, key=rank) for same in of_name.values()]


def rank(domain: DomainState) -> tuple[bool, int, bool, bool, str]:
    """Of the domains that bear the intent of one VM the lowest is that VM."""
    name = domain.intent.spec.name
    other = {True: 0, None: 1, False: 2}[domain.original]
    renamed = domain.name not in (name, domain_name(domain.intent.owner, name))
    return domain.released, other, domain.state == "stopped", renamed, domain.name

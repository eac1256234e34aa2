"""The modes of a host, and what happens in each: the one table that the daemons, their tests and
docs/reference/modes.md share.

An operator sets the mode; it says what the host agent may do, by itself and on command. ``active`` is the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class HostMode(StrEnum):
    """What an operator has a host do."""

    ACTIVE = "active"
    #: Maintenance: the agent changes no size, reads and reports as ever.
    PAUSED = "paused"
    #: No new VM comes; those that are there grow as room appears.
    DRAINING = "draining"
    #: All that was taken is given back as far as there is room; then the VMs are left alone.
    OFF = "off"


class HostEvent(StrEnum):
    """What may come up at a host agent."""

    CREATE = "create"
    DELETE = "delete"
    #: A target that takes something from a VM, and one that does not.
    SHRINK = "shrink"
    GROW = "grow"
    RECLAIM = "reclaim"
    REINFLATE = "reinflate"
    #: An adopted VM is to be given back, with all that was taken from it.
    RELEASE = "release"
    #: Readings, explanations, history, dry runs, reports to the manager.
    READING = "reading"
    #: A VM holds more than is committed, or a parked vCPU runs.
    DRIFT = "drift"
    #: A resize that was begun and has not reached its target.
    UNFINISHED = "unfinished"
    #: A guest agent has come (back): after a start or a reset.
    HELLO = "hello"
    #: A domain of ours starts, and not by us.
    FOREIGN_START = "foreign-start"
    #: A guest is under pressure or asks for memory.
    PRESSURE = "pressure"
    #: The host has room and a VM lacks something.
    ROOM = "room"
    #: The host has room within the budget of its harvest VMs.
    HARVEST = "harvest"
    #: Steady mode takes idle memory before it is asked for, and gives it back.
    TRIM = "trim"
    #: A memory limit of ours is no longer backed by swap.
    LIMIT_UNBACKED = "limit-unbacked"
    #: A creation or deletion that was begun when the mode changed or the agent was killed.
    HALF_DONE = "half-done"
    #: A domain of ours that no VM belongs to: a creation that was given up, or a VM's that was out of sight.
    ORPHAN = "orphan"


class Reaction(StrEnum):
    """What the agent does about it."""

    DONE = "done"
    REFUSED = "refused"
    #: Seen and written down, and nothing else.
    LEFT = "left"


_ALWAYS: Final = (HostEvent.DELETE, HostEvent.READING, HostEvent.LIMIT_UNBACKED, HostEvent.HALF_DONE, HostEvent.ORPHAN)
_COMMANDS: Final = tuple(HostEvent(name) for name in ("create", "shrink", "grow", "reclaim", "reinflate", "release"))
#: What a mode does not do; all else is done.
_NOT_DONE: Final[Mapping[HostMode, tuple[HostEvent, ...]]] = {
    # Room is shared by the manager, who knows for whom it was made.
    HostMode.ACTIVE: (HostEvent.ROOM,),
    # Nothing new comes, so nothing is taken for it; what a target took would be given back at once.
    HostMode.DRAINING: (HostEvent.CREATE, HostEvent.SHRINK, HostEvent.RECLAIM, HostEvent.TRIM),
    HostMode.PAUSED: tuple(event for event in HostEvent if event not in _ALWAYS),
    HostMode.OFF: tuple(event for event in HostEvent if event not in (*_ALWAYS, HostEvent.ROOM, HostEvent.RELEASE)),
}
_WHY: Final[Mapping[HostMode, str]] = {
    HostMode.DRAINING: "is draining: it takes no new VM and its VMs only grow",
    HostMode.PAUSED: "is paused: no VM is created and no size is changed",
    HostMode.OFF: "is off: its VMs are left alone",
}
#: How to leave a mode, as it stands in every refusal.
RESUME: Final = "`ebb host resume {host}` makes it active again"


def reaction(mode: HostMode, event: HostEvent) -> Reaction:
    """What the agent does about an event in a mode."""
    # A mode of a later version is one in which nothing is done for now.
    if event not in _NOT_DONE.get(mode, _NOT_DONE[HostMode.PAUSED]):
        return Reaction.DONE
    return Reaction.REFUSED if event in _COMMANDS else Reaction.LEFT


def refusal(host: str, mode: HostMode, reason: str, event: HostEvent) -> str:
    """Why a command is refused, in one sentence; empty if it is not.

    :param reason: what the operator gave as the reason of the mode; may be empty.
    """
    if reaction(mode, event) is not Reaction.REFUSED:
        return ""
    because = f" ({reason})" if reason else ""
    why = _WHY.get(mode, f"is {mode}, a mode that is not known here")
    return f"{host} {why}{because}; {RESUME.format(host=host)}"


def takes_new_vms(mode: HostMode) -> bool:
    """Whether placement may choose a host of this mode."""
    return reaction(mode, HostEvent.CREATE) is Reaction.DONE

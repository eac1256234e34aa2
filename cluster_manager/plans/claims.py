"""Rows of the store: phases, what is stored with a plan's first action and its others, room, lines of the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from cluster_manager.plans.preemption import PreemptionReason
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.explanations import EventKind
from ebbtide.messages.vms import VMSpec


class VMPhase(StrEnum):
    """Where a VM stands in the store. ``ended`` rows are history: their names are free again."""

    PLACING = "placing"
    RUNNING = "running"
    DELETING = "deleting"
    STOPPING = "stopping"
    #: Off, with its name, its host and its disk.
    STOPPED = "stopped"
    STARTING = "starting"
    #: Off for lack of room, as ``stopped``; it is started again when there is some.
    PREEMPTED = "preempted"
    MIGRATING = "migrating"
    FAILED = "failed"
    ENDED = "ended"


#: The VM's domain is off, and its disk is there.
OFF: Final = (VMPhase.STOPPED, VMPhase.PREEMPTED)


@dataclass(frozen=True, slots=True)
class AddVM:
    """A new VM of the plan's name; a failed one of that name, which is on no host, ends."""

    host: str | None
    spec: VMSpec
    sentence: str
    labels: Mapping[str, str] = field(default_factory=dict)
    #: Whether the acquirer asks for it.
    acquired: bool = False


@dataclass(frozen=True, slots=True)
class ClaimVM:
    """The plan's VM is this request's; ``phase``: what it is in from now on, if that changes."""

    phase: VMPhase | None = None


@dataclass(frozen=True, slots=True)
class ClaimRemoval:
    """The plan deletes its VM; ``phase``: what it is in until then."""

    phase: VMPhase


@dataclass(frozen=True, slots=True)
class SetGeneration:
    """The generation of a target for the plan's VM."""

    generation: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A VM that is to come to a host.

    ``size``: the room that its plan has chosen there, without the overhead; ``keeps``: what it keeps of that once its
    guest answers and others need room; ``until_s``: until when it looks for room, seconds since the epoch.
    """

    vm: str
    size: ResourceVector
    keeps: ResourceVector
    until_s: float


@dataclass(frozen=True, slots=True)
class SetVM:
    """What became of a VM.

    ``owed``: it may still be on the host, and is to be removed there as soon as the host answers again.
    ``unless_preempted``: one that was preempted on its way waits for room instead.
    """

    name: str
    phase: VMPhase
    host: str | None
    sentence: str
    owed: bool = False
    unless_preempted: bool = False


@dataclass(frozen=True, slots=True)
class SetPreempted:
    """A VM was stopped for lack of room. One that a plan is at work on stays that plan's; where that moves, starts or
    deletes it, it is kept for its end (``SetVM.unless_preempted``).

    ``unsure``: perhaps it was not; its host's next report says.
    """

    name: str
    host: str
    reason: PreemptionReason
    sentence: str
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class SetSpec:
    """What a VM is sold as from now on."""

    name: str
    spec: VMSpec


@dataclass(frozen=True, slots=True)
class ReinflationPending:
    """Whether VMs of this host may be smaller than they need be, so that they are still to be reinflated."""

    host: str
    owed: bool


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the event log."""

    kind: EventKind
    vm: str | None
    host: str | None
    sentence: str


Claim = AddVM | ClaimVM | ClaimRemoval | SetGeneration

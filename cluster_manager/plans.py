"""The vocabulary of plans: what a plan is told to do next, what it hears, and what it leaves in the record.

A plan is a pure state machine. :func:`cluster_manager.transitions.advance` takes its state and an event and returns
the next state with exactly one instruction, and the effects to be stored in the same transaction. The state holds
everything, so a manager that starts again carries out the instruction that it finds (docs: flow of one deflation).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from deflation import admission
from deflation.allocations import Priority
from deflation.instructions import Mode
from deflation.messages import HostReport, Operation, OperationState, Vector, VMOutcome, VMSpec
from deflation.placement_policies import PlacementPolicy

#: Hosts that a placement acts on before it gives up or preempts.
MOST_HOSTS: Final = admission.MOST_HOSTS
#: For how long a VM whose plan waits for a host stays with that plan, in seconds; then its owner may go on without.
GONE_S: Final = 3600.0
#: How often an agent may forget a command of one plan that it had taken on.
MOST_LAPSES: Final = 2

PlanKind = Literal["create", "delete", "target", "reinflate", "stop", "start", "resize", "migrate", "adopt", "release"]
#: ``deflated``: its VM may start at less than its nominal size.
Purpose = Literal["place", "deflated", "preempt"]
Reason = Literal["delete", "minimum", "shortfall"]


class Record(BaseModel):
    """Base of what is stored with a plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# --- instructions: what is to be done next ---------------------------------------------------------------------------


class ChooseHosts(Record):
    """Rank the ready hosts. Answer: :class:`HostsChosen`."""

    do: Literal["choose-hosts"] = "choose-hosts"
    purpose: Purpose


class ReadHost(Record):
    """Read what the host's agent says now. Answer: :class:`HostRead` or :class:`HostFailed`."""

    do: Literal["read-host"] = "read-host"
    host: str


class Commanding(Record):
    """An instruction that sends a command; ``step`` makes its request id, so that repeating it is harmless.

    Answer: :class:`OperationEnded`, :class:`HostFailed`, or :class:`Forgotten` where repeating would not be harmless.
    """

    host: str
    step: int


class Reclaim(Commanding):
    """Free ``need`` on the host by deflation."""

    do: Literal["reclaim"] = "reclaim"
    need: Vector
    deadline_s: float
    #: VMs that give nothing: the room is for them.
    exclude: tuple[str, ...] = ()


class Create(Commanding):
    """Start the plan's VM on the host, at its nominal size unless another one is given."""

    do: Literal["create"] = "create"
    initial: Vector | None = None


class Remove(Commanding):
    """Stop a VM. A VM that is not there counts as removed."""

    do: Literal["remove"] = "remove"
    vm: str
    reason: Reason


class Reinflate(Commanding):
    """Share the host's free room among the VMs that lack something, or among those named."""

    do: Literal["reinflate"] = "reinflate"
    vms: tuple[str, ...] = ()
    room: Vector | None = None


class SetTarget(Commanding):
    """Bring a VM to a size."""

    do: Literal["set-target"] = "set-target"
    vm: str
    generation: int
    target: Vector
    deadline_s: float
    mode: Mode


class Stop(Commanding):
    """Have a VM power off and keep it."""

    do: Literal["stop"] = "stop"
    vm: str
    limit_s: float


class Start(Commanding):
    """Start a VM that is off."""

    do: Literal["start"] = "start"
    vm: str


class Respec(Commanding):
    """Sell a VM something else."""

    do: Literal["respec"] = "respec"
    vm: str
    spec: VMSpec
    deadline_s: float


class Adopt(Commanding):
    """Look after a domain of somebody else."""

    do: Literal["adopt"] = "adopt"
    vm: str
    domain: str
    priority: Priority
    minimum: Vector


class Release(Commanding):
    """Give an adopted domain back. A VM that is not there counts as released."""

    do: Literal["release"] = "release"
    vm: str


class AwaitHost(Record):
    """Wait, without holding any host, until a host reports. Answer: :class:`HostBack`, or :class:`HostFailed` when the
    plan has been running for ``until_s``; None: for as long as it takes."""

    do: Literal["await-host"] = "await-host"
    host: str
    until_s: float | None = None


class Finish(Record):
    """The plan has ended."""

    do: Literal["finish"] = "finish"
    state: OperationState
    sentence: str


Instruction = Annotated[
    ChooseHosts
    | ReadHost
    | Reclaim
    | Create
    | Remove
    | Reinflate
    | SetTarget
    | Stop
    | Start
    | Respec
    | Adopt
    | Release
    | AwaitHost
    | Finish,
    Field(discriminator="do"),
]


def host_of(instruction: Instruction) -> str | None:
    """The host that an instruction acts on; while it does, no other plan may."""
    return None if isinstance(instruction, ChooseHosts | AwaitHost | Finish) else instruction.host


# --- events: what a plan hears ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all: how long the plan has been running, in seconds."""

    elapsed_s: float


@dataclass(frozen=True, slots=True)
class HostsChosen(Event):
    """The hosts to try, best first; ``sentence`` says why there are none."""

    hosts: tuple[str, ...]
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class HostRead(Event):
    """What the agent itself says at this moment. ``kept``: the store has the plan's VM on this host."""

    report: HostReport
    kept: bool = False


@dataclass(frozen=True, slots=True)
class HostBack(Event):
    """A host that was waited for reports."""


@dataclass(frozen=True, slots=True)
class OperationEnded(Event):
    """A command's operation has come to its end, whichever."""

    operation: Operation


@dataclass(frozen=True, slots=True)
class HostFailed(Event):
    """The host could not be used. ``uncertain``: whether the command was carried out is unknown."""

    sentence: str
    uncertain: bool


@dataclass(frozen=True, slots=True)
class Forgotten(Event):
    """The agent knows nothing of a command that may once have been sent to it.

    ``lapse``: it had taken the command on in this run of the manager, so it is the agent that forgot.
    """

    lapse: bool


# --- effects: what is stored together with the next state ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the event log."""

    kind: str
    vm: str | None
    host: str | None
    sentence: str


class VMPhase(StrEnum):
    """Where a VM stands in the store. ``ended`` rows are history: their names are free again."""

    PLACING = "placing"
    RUNNING = "running"
    DELETING = "deleting"
    STOPPING = "stopping"
    #: Off, with its name, its host and its disk.
    STOPPED = "stopped"
    STARTING = "starting"
    MIGRATING = "migrating"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SetVM:
    """What became of a VM.

    ``owed``: it may still be on the host, and is to be removed there as soon as the host answers again.
    """

    name: str
    phase: VMPhase
    host: str | None
    sentence: str
    owed: bool = False


@dataclass(frozen=True, slots=True)
class SetSpec:
    """What a VM is sold as from now on."""

    name: str
    spec: VMSpec


@dataclass(frozen=True, slots=True)
class OweReinflation:
    """Whether VMs of this host may be smaller than they need be, so that somebody has to reinflate them."""

    host: str
    owed: bool


@dataclass(frozen=True, slots=True)
class Handover:
    """What is left to do becomes a plan of the manager's own, so that nobody waits for its operation any longer."""

    state: PlanState


Effect = Note | SetVM | SetSpec | OweReinflation | Handover


# --- state -----------------------------------------------------------------------------------------------------------


class Target(Record):
    """What a ``target`` plan was asked for."""

    generation: int
    target: Vector
    deadline_s: float
    mode: Mode


class Life(Record):
    """What the plans of a VM's lifecycle know besides."""

    #: The host that the VM is bound to.
    home: str
    #: Where a migration is: finding room, unsure whether the VM runs on its new host, removing what must not be there,
    #: going back home, clearing away what is left there, removing it from a new host that was waited for no longer.
    stage: Literal["room", "unsure", "clean", "home", "clear", "left"] = "room"
    #: Time for a guest's own power-off, in seconds.
    limit_s: float = 60.0
    #: Resizes: what the VM is to be sold as.
    spec: VMSpec | None = None
    #: Starts: whether another host will do; and whether it is looked for now.
    anywhere: bool = False
    moving: bool = False
    #: Migrations: whether the VM is off, and whether it is to run again at home if nothing else comes of it.
    off: bool = False
    was_running: bool = True
    #: Until when hosts that do not answer are waited for, as ``elapsed_s``; None: nobody was waited for yet.
    waits_until_s: float | None = None
    #: Whether this is what an operation left that has ended, and for how long it waits then for a host that has its VM.
    rest: bool = False
    gone_s: float = GONE_S
    #: Adoptions.
    domain: str = ""
    priority: Priority = Priority.DEFLATABLE
    minimum: Vector = Vector()


class PlanState(Record):
    """Everything a plan knows. Never changed in place: each event makes a new one."""

    kind: PlanKind
    #: The base of the request ids of its commands.
    id: str
    #: The client's request id.
    request_id: str
    instruction: Instruction
    #: Instructions given so far, with the present one; numbers the commands.
    step: int = 1
    vm: str | None = None
    #: What has been done so far, a sentence a step.
    progress: tuple[str, ...] = ()
    #: What the last reclaim or reinflation did to each VM.
    outcomes: tuple[VMOutcome, ...] = ()
    shortfall: Vector = Vector()

    # placements
    spec: VMSpec | None = None
    deadline_s: float = 0.0
    policy: PlacementPolicy = PlacementPolicy.BEST_FIT
    purpose: Purpose = "place"
    #: The host it is at: while it runs, none other may count this room.
    host: str | None = None
    #: Hosts still to try, best first.
    hosts_left: tuple[str, ...] = ()
    #: Hosts that were acted on for the present purpose.
    tried: int = 0
    #: Why each host failed.
    failures: tuple[str, ...] = ()
    #: Since when the deadline runs, as ``elapsed_s``.
    clock_from_s: float = 0.0
    #: On the present host: reclaims that were commanded and that ended, how the last one ended and which layer failed,
    #: how often the VM's start was commanded, and how often the agent forgot.
    reclaims: int = 0
    rounds: int = 0
    reclaimed: OperationState | None = None
    failed_layer: str | None = None
    starts: int = 0
    lapses: int = 0
    #: On the present host, when preempting: why, and the size that each VM should have reached.
    reason: Reason | None = None
    targets: dict[str, Vector] = {}
    victims: tuple[str, ...] = ()
    #: On the present host, when starting deflated: the size to start at.
    initial: Vector | None = None
    #: How the plan ends once the sizes it changed are given back; None: with the next host.
    conclusion: Finish | None = None

    # deletions and targets
    target: Target | None = None

    life: Life | None = None

    @property
    def finished(self) -> bool:
        return isinstance(self.instruction, Finish)

    @property
    def changed(self) -> bool:
        """Whether sizes on the present host may be smaller because of this plan."""
        return self.reclaims > 0 or bool(self.victims)

"""Vocabulary of plans: instructions, events, effects, and the state that all kinds share.

A plan is a pure state machine: a type a kind, each in the module of its kind. `Plan.next_step` takes an event and
returns the next state with exactly one instruction, and the effects to be stored in the same transaction. The state
holds everything, so a manager that starts again carries out the instruction that it finds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from cluster_manager.plans.claims import OFF as OFF
from cluster_manager.plans.claims import Arrival as Arrival
from cluster_manager.plans.claims import Claim as Claim
from cluster_manager.plans.claims import ClaimVM as ClaimVM
from cluster_manager.plans.claims import Note as Note
from cluster_manager.plans.claims import ReinflationPending as ReinflationPending
from cluster_manager.plans.claims import SetPreempted as SetPreempted
from cluster_manager.plans.claims import SetSpec as SetSpec
from cluster_manager.plans.claims import SetVM as SetVM
from cluster_manager.plans.claims import VMPhase as VMPhase
from cluster_manager.plans.preemption import PreemptionReason
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.deflation.errors import ProtocolViolation
from ebbtide.deflation.placement import placement_step
from ebbtide.deflation.placement.rebalancing import Rooms
from ebbtide.deflation.placement.waiting import MOVE_MIB_S
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import PartialVector, Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.migrations import MigrationAddress
from ebbtide.messages.operations import Operation, OperationState, VMOutcome
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.vms import VMSpec

#: Hosts that a placement acts on before it gives up or preempts.
MOST_HOSTS: Final = placement_step.MOST_HOSTS
#: How often an agent may forget a command of one plan that it had taken on.
MOST_LAPSES: Final = 2

PlanKind = Literal["create", "delete", "target", "reinflate", "stop", "start", "resize", "migrate", "adopt", "release",
                   "return", "live-migrate", "cancel"]  # fmt: skip
#: ``deflated``: its VM may start at less than its nominal size.
Purpose = Literal["place", "deflated", "preempt"]


class Record(BaseModel):
    """Base of what is stored with a plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# --- instructions: what is to be done next ---------------------------------------------------------------------------


class ChooseHosts(Record):
    """Rank the ready hosts other than the plan's home, and read the first one. Answer: `HostsChosen`."""

    do: Literal["choose-hosts"] = "choose-hosts"
    purpose: Purpose


class ReadHost(Record):
    """Read what the host's agent says now. Answer: `HostRead` or `HostFailed`."""

    do: Literal["read-host"] = "read-host"
    host: str


class Commanding(Record):
    """An instruction that sends a command; ``step`` makes its request id, so that repeating it is harmless.

    Answer: `OperationEnded`, `HostFailed`, or `Forgotten` where repeating would not be harmless.
    """

    host: str
    step: int

    @property
    def read_next(self) -> bool:
        """Whether the plan reads the host itself once this has been carried out."""
        return False


class Reclaim(Commanding):
    """Free ``need`` on the host by deflation."""

    do: Literal["reclaim"] = "reclaim"
    need: Vector
    deadline_s: float
    #: VMs that give nothing: the room is for them.
    exclude: tuple[str, ...] = ()
    #: Arrivals that wait for the same host, for which it is, too.
    others: int = 0

    @property
    def read_next(self) -> bool:
        return True


class Create(Commanding):
    """Start the plan's VM on the host, at its nominal size unless another one is given."""

    do: Literal["create"] = "create"
    start_size: Vector | None = None


class Remove(Commanding):
    """Stop a VM. A VM that is not there counts as removed."""

    do: Literal["remove"] = "remove"
    vm: str
    reason: Literal["delete"] | PreemptionReason
    #: How long one that is preempted has to end its work.
    notice_s: float = 0.0

    @property
    def read_next(self) -> bool:
        """After a preemption it does."""
        return self.reason != "delete"


class Preempt(Commanding):
    """Have a VM power off for lack of room and keep it; it is told, and has ``notice_s`` to end its work."""

    do: Literal["preempt"] = "preempt"
    vm: str
    reason: PreemptionReason
    notice_s: float
    #: Whether its memory is to be saved, where its host has room and time for that.
    suspend: bool = False

    @property
    def read_next(self) -> bool:
        return True


class PreemptTogether(Commanding):
    """Several VMs of a host go at the same time, each within its own notice. Answer: `EndedTogether`."""

    do: Literal["preempt-together"] = "preempt-together"
    #: Their steps count up from this one's.
    victims: tuple[Annotated[Preempt | Remove, Field(discriminator="do")], ...]

    @property
    def read_next(self) -> bool:
        return True


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
    #: Whether its request gave no generation: then it is the next one when it is sent.
    unnumbered: bool = False
    #: What it leaves out is filled in when it is sent.
    target: PartialVector
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
    #: None: at the size that it had last.
    start_size: Vector | None = None


class Respec(Commanding):
    """Sell a VM something else."""

    do: Literal["respec"] = "respec"
    vm: str
    spec: VMSpec
    deadline_s: float


class Adopt(Commanding):
    """Look after a domain that was made outside Ebbtide."""

    do: Literal["adopt"] = "adopt"
    vm: str
    domain: str
    priority: Priority
    minimum: Vector

    @property
    def read_next(self) -> bool:
        return True


class Release(Commanding):
    """Give an adopted domain back. A VM that is not there counts as released."""

    do: Literal["release"] = "release"
    vm: str


class Arrive(Commanding):
    """Keep room on a host for a VM that is to move there while it runs."""

    do: Literal["arrive"] = "arrive"
    spec: VMSpec
    size: Vector
    boot_memory_mib: float
    generation: int
    uuid: str


class Depart(Commanding):
    """Move a running VM from its host to another one."""

    do: Literal["depart"] = "depart"
    vm: str
    to: str
    address: MigrationAddress
    copy_storage: bool
    bandwidth_mib_s: float
    deadline_s: float
    #: The size for which its next host has room; None: in plans that an earlier version has stored.
    size: Vector | None = None


class AwaitHost(Record):
    """Wait, without holding any host, until a host reports. Answer: `HostBack`, or `HostFailed` when the
    plan has been running for ``until_s``; None: for as long as it takes."""

    do: Literal["await-host"] = "await-host"
    host: str
    until_s: float | None = None


class AwaitGuests(Record):
    """Wait, without holding any host, until guests of a host that cannot be deflated yet can be.

    Answer: `HostBack` as soon as one of ``vms`` answers, or when the plan has been running for ``until_s``.
    """

    do: Literal["await-guests"] = "await-guests"
    host: str
    vms: tuple[str, ...]
    until_s: float


class AwaitPlan(Record):
    """Call a placement off, and wait until its plan has ended. Answer: `PlanEnded`."""

    do: Literal["await-plan"] = "await-plan"
    request_id: str


class MoveAway(Record):
    """Have a VM move to another host while it runs, by a plan of its own, and wait for that without holding any host.

    Answer: `Moved`, also when this plan has been running for ``until_s``.
    """

    do: Literal["move-away"] = "move-away"
    vm: str
    source: str
    to: str
    step: int
    #: For finding room, and once more for the move.
    deadline_s: float
    until_s: float
    copy_storage: bool = False


class Finish(Record):
    """The plan has ended."""

    do: Literal["finish"] = "finish"
    state: OperationState
    sentence: str
    reason: ReasonCode | None = None
    #: How long the plan took, by a clock that nobody sets; None: it ended in an earlier version.
    seconds: float | None = None


Instruction = Annotated[
    ChooseHosts
    | ReadHost
    | Reclaim
    | Create
    | Remove
    | Preempt
    | PreemptTogether
    | Reinflate
    | SetTarget
    | Stop
    | Start
    | Respec
    | Adopt
    | Release
    | Arrive
    | Depart
    | AwaitHost
    | AwaitGuests
    | AwaitPlan
    | MoveAway
    | Finish,
    Field(discriminator="do"),
]


def host_of(instruction: Instruction) -> str | None:
    """The host that an instruction acts on; while it does, no other plan may."""
    if isinstance(instruction, ChooseHosts | AwaitHost | AwaitGuests | AwaitPlan | MoveAway | Finish):
        return None
    return instruction.host


def preempted_by(instruction: Instruction) -> tuple[Preempt | Remove, ...]:
    """How an instruction preempts VMs; none: it preempts none."""
    match instruction:
        case Preempt() | Remove(reason=PreemptionReason()):
            return (instruction,)
        case PreemptTogether(victims=victims):
            return victims
    return ()


# --- events: what a plan hears ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all: how long the plan has been running, in seconds."""

    elapsed_s: float


@dataclass(frozen=True, slots=True)
class HostRead(Event):
    """What the agent itself says at this moment.

    ``recorded``: the VMs that the manager's own record has on this host: of others nothing that is said counts.
    ``sold``: as what, for a plan that may preempt or waits before it does.
    ``elsewhere``: another host that could hold the VM by deflation now, for a plan that may preempt.
    ``at``: when, seconds since the epoch.
    ``queue``: the arrivals that wait for this host behind a placement that has it.
    ``rooms``: what other hosts have free or deflatable, for a plan that may preempt; None: nobody moves first.
    ``copies``: whether one may move whose disk has to be copied.
    ``move_mib_s``: what a move copies in a second at the least.
    """

    report: HostReport
    recorded: frozenset[str] = frozenset()
    sold: Mapping[str, VMSpec] = field(default_factory=dict)
    elsewhere: str | None = None
    at: float = 0.0
    queue: tuple[Arrival, ...] = ()
    rooms: Rooms | None = None
    copies: bool = False
    move_mib_s: float = MOVE_MIB_S


@dataclass(frozen=True, slots=True)
class HostBack(Event):
    """A host that was waited for reports, or guests on it were waited for long enough."""


@dataclass(frozen=True, slots=True)
class CalledOff(Event):
    """The VM's owner does not want it any more. Answers what a placement looks and waits for."""


@dataclass(frozen=True, slots=True)
class PlanEnded(Event):
    """A placement has ended. ``host``: where its VM is, or may be; None: on none. ``done``: whether it was placed."""

    host: str | None
    done: bool = True


@dataclass(frozen=True, slots=True)
class Moved(Event):
    """A move has come to its end, or takes too long. ``done``: whether its VM is on the other host."""

    done: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class OperationEnded(Event):
    """A command's operation has come to its end, whichever.

    ``failed``: VMs that the manager's record does not have on this host, and for which calls failed, with the first
    error of each: nothing else that is said of them counts, but for an error nobody is preempted.
    ``waited_s``: for how long the plan waited for the host before the command was sent.
    """

    operation: Operation
    failed: tuple[tuple[str, str], ...] = ()
    waited_s: float = 0.0

    @property
    def sentence(self) -> str:
        return self.operation.sentence

    @property
    def code(self) -> ReasonCode | None:
        """Of what ends by it, as `HostFailed.code`: no more is known than the operation says."""
        return None


@dataclass(frozen=True, slots=True)
class EndedTogether(Event):
    """What became of each of several commands, in their order: `OperationEnded` or `HostFailed`."""

    ended: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class HostFailed(Event):
    """The host could not be used. ``uncertain``: perhaps it did what it was told. ``reached``: it may have heard.

    ``code``: why, for what ends by it. ``busy``: it was not asked, since another plan had it for too long.
    """

    sentence: str
    uncertain: bool
    reached: bool = True
    code: ReasonCode = ReasonCode.HOST_UNAVAILABLE
    busy: bool = False


@dataclass(frozen=True, slots=True)
class HostsChosen(Event):
    """The hosts to try, best first, or why there are none; ``first``: how the first answers, if it was read already."""

    hosts: tuple[str, ...]
    sentence: str = ""
    first: HostRead | HostFailed | None = None
    ready: bool = True


@dataclass(frozen=True, slots=True)
class Forgotten(Event):
    """The agent does not know a command that may have been sent. ``lapse``: it took it on in this run, and forgot."""

    lapse: bool


# --- effects: what is stored together with the next state ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpawnFollowUp:
    """What is left to do becomes a plan of the manager's own, so that no client's operation waits for it any longer."""

    state: Plan


Effect = Note | SetVM | SetPreempted | SetSpec | ReinflationPending | SpawnFollowUp


# --- state -----------------------------------------------------------------------------------------------------------


class Plan(Record, ABC):
    """State of a plan of any kind. Never changed in place: each event makes a new one."""

    kind: PlanKind
    #: The base of the request ids of its commands.
    id: str
    #: The client's request id.
    request_id: str
    instruction: Instruction
    #: Instructions given so far, with the present one; numbers the commands.
    step: int = 1
    vm: str | None = None
    #: The host it is at.
    host: str | None = None
    #: What has been done so far, a sentence a step.
    progress: tuple[str, ...] = ()
    #: What the last reclaim or reinflation did to each VM.
    outcomes: tuple[VMOutcome, ...] = ()
    shortfall: Vector = Vector()
    #: Its span, and the one above it, as they travel (``traceparent``); empty: it is not traced.
    trace: tuple[str, ...] = Field((), exclude_if=lambda trace: not trace)

    @property
    def finished(self) -> bool:
        return isinstance(self.instruction, Finish)

    @property
    def internal(self) -> bool:
        """Whether it is the manager's own, which no client asked for."""
        return self.request_id == self.id

    @property
    def claim(self) -> Claim | None:
        """What becomes of its VM's row as the plan is recorded; None: nothing."""
        return None

    @property
    def reserved(self) -> ResourceVector | None:
        """The room at its host that no other plan may count, without the overhead; None: none."""
        return None

    @property
    def home(self) -> str | None:
        """The host that its VM is bound to, where the plan may come back to it."""
        return None

    def having(self, **changes: Any) -> Self:
        """The same plan with other values."""
        return self.model_copy(update=changes)

    @abstractmethod
    def next_step(self, event: Event) -> Step:
        """What the plan does upon an event; each kind has its own answer.

        :raises ProtocolViolation: the event does not answer the plan's instruction, or the plan has ended.
        """


class RoomPlan(Plan):
    """State of a plan that makes room on a host by deflation."""

    #: For finding a place by deflation, in seconds.
    deadline_s: float = 0.0
    #: Why each host failed.
    failures: tuple[str, ...] = ()
    #: On the present host: reclaims that were commanded and that ended, how the last one ended and which layer failed,
    #: how often the VM's start was commanded, and how often the agent forgot.
    reclaims: int = 0
    rounds: int = 0
    reclaimed: OperationState | None = None
    failed_layer: str | None = None
    starts: int = 0
    lapses: int = 0
    #: On the present host: calls of its hypervisor that failed, and the VMs left out for them: all charged, none given.
    errors: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    #: Those that gave less than they were asked for, so that others are.
    gave_less: tuple[str, ...] = ()
    #: On the present host: whether a deflation for several arrivals fell short, so that the plan goes on for itself.
    alone: bool = False
    #: How the plan ends once the sizes it changed are given back; None: it goes on.
    conclusion: Finish | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The next state, and what is to be stored with it."""

    state: Plan
    effects: tuple[Effect, ...] = ()

    def also(self, *effects: Effect) -> Step:
        """The same step with more effects, ahead of its own."""
        return Step(self.state, effects + self.effects)


def instruct(state: Plan, instruction: Instruction, said: str = "", **changes: Any) -> Step:
    """The state with its next instruction, and a sentence of progress."""
    progress = (*state.progress, said) if said else state.progress
    return Step(state.having(**{"instruction": instruction, "step": state.step + 1, "progress": progress, **changes}))


def finish(state: Plan, how: OperationState, said: str, *, reason: ReasonCode | None = None, **changes: Any) -> Step:
    """The end of a plan. ``reason``: why not all was done; None: no more is known than the shortfall."""
    return instruct(state, Finish(state=how, sentence=said, reason=reason), said, **changes)


def unexpected(state: Plan, event: Event) -> ProtocolViolation:
    """An event that does not answer the plan's instruction."""
    return ProtocolViolation("event", f"{type(event).__name__} does not answer {state.instruction.do}")

"""REST bodies of tasks: long work that is run where the cores will stay."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from ebbtide.deflation.errors import InvalidField
from ebbtide.messages.common import Body, Name, Open, RequestId, WatchedPage

#: A word of a command; no NUL, which no program can be given.
Word = Annotated[str, Field(max_length=2048, pattern=r"^[^\x00]*$")]
Cores = Annotated[int, Field(ge=1, le=4096, strict=True)]
#: Up to thirty days.
Duration = Annotated[float, Field(ge=0, le=2_592_000, allow_inf_nan=False, strict=True)]


PreemptionAversion = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
#: Up to thirty days.
Checkpoint = Annotated[float, Field(gt=0, le=2_592_000, allow_inf_nan=False, strict=True)]


#: Up to the longest notice.
CheckpointGrace = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, strict=True)]


class CheckpointSignal(StrEnum):
    """What a command may ask to get before its machine goes."""

    TERM = "TERM"
    USR1 = "USR1"
    USR2 = "USR2"


class TaskState(StrEnum):
    """Where a task stands."""

    WAITING = "waiting"
    RELEASED = "released"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TaskSpec(Body):
    """A task as it is asked for."""

    name: Name = Field(description="its name, used once")
    command: tuple[Word, ...] = Field(min_length=1, max_length=64, description="a program and its arguments; no shell")
    cores: Cores = Field(1, description="it holds while it runs")
    duration_s: Duration | None = Field(None, description="how long it is expected to run; null: unknown")
    restartable: bool = Field(
        False, strict=True, description="it may be begun again after it was broken off; else it begins once at the most"
    )
    max_attempts: int = Field(5, ge=1, le=100, strict=True, description="so often it is begun at the most")
    preemption_aversion: PreemptionAversion = Field(
        0.0,
        description="of preemption: 0 counts its time only, 0.5 one duration more, 1 waits for the steadiest machine",
    )
    checkpoint_s: Checkpoint | None = Field(
        None, description="it saves its work every so often, and goes on from there; null: it begins again"
    )
    checkpoint_signal: CheckpointSignal | None = Field(
        None, description="its command gets it when the VM under it is to be preempted; null: it is not told"
    )
    checkpoint_grace_s: CheckpointGrace | None = Field(
        None,
        description="so long it needs to save its work then; null: as long as the VM's notice lets it",
    )

    @model_validator(mode="after")
    def _grace_has_a_signal(self) -> Self:
        if self.checkpoint_grace_s is not None and self.checkpoint_signal is None:
            raise InvalidField("checkpoint_grace_s", "says nothing without checkpoint_signal")
        return self


class TaskRequest(Body):
    """POST /v1/tasks."""

    request_id: RequestId
    task: TaskSpec = Field(description="as it is asked for")


class ManagedTask(Body):
    """A task as the manager has it. Times are seconds since the epoch."""

    name: Name = Field(description="its name")
    state: Open[TaskState] = Field(description="where it stands")
    cores: int = Field(description="it holds while it runs")
    duration_s: float | None = Field(description="how long it is expected to run; null: unknown")
    restartable: bool = Field(description="whether it may be begun again")
    max_attempts: int = Field(description="so often it is begun at the most")
    preemption_aversion: float = Field(0.0, description="as it was asked for")
    checkpoint_s: float | None = Field(None, description="it saves its work every so often")
    checkpoint_signal: Open[CheckpointSignal] | None = Field(
        None, description="its command gets it before its machine goes"
    )
    checkpoint_grace_s: float | None = Field(None, description="so long it needs to save its work then")
    command: tuple[str, ...] = Field(description="a program and its arguments")
    machine: str | None = Field(None, description="where it runs, or ran last")
    attempts: int = Field(ge=0, description="how often it has begun")
    preemptions: int = Field(ge=0, description="how often it was broken off")
    submitted_at: float = Field(description="when it came")
    started_at: float | None = Field(None, description="when its last attempt began")
    told_at: float | None = Field(None, description="when the command of that attempt got its checkpoint signal")
    ended_at: float | None = Field(None, description="null: it has not")
    exit_code: int | None = Field(None, description="of its command; null: it has not ended by itself")
    output: str | None = Field(None, description="the file with what its last attempt prints, on the machines")
    sentence: str = Field(description="what happened to it last, and why")


class TaskOutput(Body):
    """GET /v1/tasks/{name}/output: a part of what a task's last attempt prints. Offsets and size are bytes."""

    name: Name = Field(description="the task's name")
    state: Open[TaskState] = Field(description="where the task stood before the output was read")
    attempt: int = Field(ge=1, description="the number of the attempt; another one has another output")
    running: bool = Field(description="whether that attempt still runs, and may print more")
    text: str = Field(description="the part as UTF-8, with U+FFFD for what is none")
    offset: int = Field(ge=0, description="where the part begins")
    next_offset: int = Field(ge=0, description="where the next part begins")
    size: int = Field(ge=0, description="of the whole output by now")


class TaskPage(WatchedPage):
    """GET /v1/tasks of the manager: newest first."""

    tasks: tuple[ManagedTask, ...] = Field(description="newest first")


class MachineOffer(Body):
    """What one machine offers a task."""

    machine: str = Field(description="as the engine calls it")
    wait_s: float = Field(description="until it has room")
    expected_s: float = Field(
        description="until the task is expected to be done there, with the wait (Agarwal et al. 2023, Eq. 2)"
    )
    compared_s: float = Field(
        description="by what machines are compared: expected_s, and what a preemption counts beyond the time it costs"
    )
    completion_probability: float | None = Field(
        None, description="null without history, and where its cores cannot be taken: neither 0 nor 1"
    )


class TaskExplanation(Body):
    """GET /v1/tasks/{name}/explanation: why a task waits, and what it waits for."""

    task: ManagedTask = Field(description="the task")
    waits_for: str | None = Field(None, description="the machine; null: it does not wait for one")
    sentence: str = Field(description="the same in words")
    ahead: int = Field(ge=0, description="waiting tasks that get their turn before it")
    offers: tuple[MachineOffer, ...] = Field(
        (), description="of the machines that will have room, best first, 22 at the most"
    )


class EngineMachineStatus(Body):
    """A machine as the engine has it."""

    name: str = Field(description="as the engine calls it")
    up: bool = Field(description="whether the engine can use it")
    cores: int = Field(description="usable now, whole")
    most_cores: int = Field(description="what the engine was configured with")
    known: bool = Field(description="whether it is a VM of this manager, which says how many cores it has")
    drained: str = Field(description="why it takes no new task; empty: it does")
    tasks: tuple[Name, ...] = Field(description="that hold cores there")
    foreign_cores: int = Field(description="held by work that is not this manager's")


class Standing(StrEnum):
    """What the acquirer means to do with a machine."""

    HELD = "held"
    LEAVING = "leaving"
    EMPTY = "empty"


class AcquirerMachineStatus(Body):
    """A machine of the acquirer. Times are seconds since the epoch."""

    name: Name
    standing: Open[Standing] = Field(description="held; leaving: it takes no new task; empty: it is being given back")
    cores: int | None = Field(None, description="usable now, whole; null: no host tells, or it is leaving")
    came_at: float = Field(description="when it was placed, seconds since the epoch")
    unchanged_s: float | None = Field(None, description="since its last core change; null: more than a day, or leaving")
    leaves_at: float | None = Field(None, description="when it began to leave")
    tasks: tuple[Name, ...] = Field(description="that hold cores there")
    sentence: str = Field(description="why it was asked for, or why it leaves")


class AcquirerRequestStatus(Body):
    """A machine that was asked for, and has not come."""

    number: int = Field(description="counts up")
    at: float = Field(description="when it was asked for, seconds since the epoch")
    replaces: Name | None = Field(None, description="the machine that leaves when it has come")
    sentence: str = Field(description="why it was asked for")


class AcquirerStatus(Body):
    """GET /v1/acquirer of the manager: the harvest VMs that it keeps for tasks, and why."""

    on: bool = Field(description="whether this manager keeps machines for tasks")
    sentence: str = Field(description="what the last look came to")
    next_at: float | None = Field(None, description="when it looks again at what to replace and how many to keep")
    utilisation: float | None = Field(None, description="wanted cores / cores, at the last look")
    cores: int = Field(description="of the machines that are held")
    wanted_cores: int = Field(description="of all tasks that have not ended")
    machines: tuple[AcquirerMachineStatus, ...] = Field(description="that it has")
    requests: tuple[AcquirerRequestStatus, ...] = Field(description="that have not come yet")


class EngineStatus(Body):
    """GET /v1/engine of the manager: what runs the tasks."""

    kind: str = Field(description="slurm, dask, or none")
    reachable: bool = Field(description="whether it answers")
    sentence: str = Field(description="what is the matter, or that all is well")
    looked_at: float | None = Field(None, description="when it answered last, seconds since the epoch")
    machines: tuple[EngineMachineStatus, ...] = Field(description="by name")

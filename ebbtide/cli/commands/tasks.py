"""Commands about tasks: submit one, list, show, explain, cancel; and the engine that runs them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from pydantic import ValidationError

from ebbtide.cli.commands import completion
from ebbtide.cli.commands.options import (
    Asking,
    Interrupted,
    Limit,
    Listing,
    OperationFailed,
    Showing,
    asked_again,
    is_away,
    number,
    seconds,
)
from ebbtide.cli.output import (
    Steps,
    Table,
    clock,
    print_error,
    print_lines,
    print_table,
    reader_is_gone,
    shown,
)
from ebbtide.errors import EbbError
from ebbtide.messages.common import problem_of
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.messages.tasks import (
    AcquirerStatus,
    CheckpointSignal,
    EngineStatus,
    ManagedTask,
    TaskExplanation,
    TaskOutput,
    TaskSpec,
    TaskState,
)

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

Result = TypeVar("Result")
TaskName = Annotated[str, typer.Argument(metavar="NAME", help="The task's name.", autocompletion=completion.tasks)]
#: Seconds between two looks of --wait and --follow, but for its end, which is told at once.
LOOK_S: Final = 0.5
#: Of what a task prints, bytes in one answer: many small ones would use up the requests that a client has.
PART: Final = 1_048_576
_FINAL: Final = {TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED}


def submit(
    name: TaskName,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="A program and its arguments, after --.")],
    cores: Annotated[int, typer.Option(min=1, help="Whole cores.")] = 1,
    duration_s: Annotated[float | None, seconds("How long it is expected to run.")] = None,
    restartable: Annotated[bool, typer.Option("--restartable", help="It may be begun again when broken off.")] = False,
    max_attempts: Annotated[int, typer.Option(min=1, max=100, help="So often it is begun at the most.")] = 5,
    preemption_aversion: Annotated[
        float,
        typer.Option(
            parser=number(0, 1),
            metavar="NUMBER",
            help="Of being broken off: 0 counts its time only, 1 waits for the steadiest machine.",
        ),
    ] = 0.0,
    checkpoint_s: Annotated[
        float | None, typer.Option(help="It saves its work every so often, and goes on from there.")
    ] = None,
    checkpoint_signal: Annotated[
        CheckpointSignal | None, typer.Option(help="Its command gets it when the VM under it is to be preempted.")
    ] = None,
    checkpoint_grace_s: Annotated[
        float | None,
        seconds(
            "How long it then needs to save its work; at most as the VM's notice lets it (docs/reference/tasks.md)."
        ),
    ] = None,
    request_id: Annotated[str | None, typer.Option(help="Makes a repeated submission harmless.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end; exit with 1 unless it is done.")] = False,
    *,
    to: Asking,
) -> None:
    """Submit a task; it is run where it is expected to be done first."""
    try:
        spec = TaskSpec(
            name=name,
            command=tuple(command),
            cores=cores,
            duration_s=duration_s,
            restartable=restartable,
            max_attempts=max_attempts,
            preemption_aversion=preemption_aversion,
            checkpoint_s=checkpoint_s,
            checkpoint_signal=checkpoint_signal,
            checkpoint_grace_s=checkpoint_grace_s,
        )
    except ValidationError as error:
        raise EbbError(problem_of(error).detail) from error
    from ebbtide.client import ManagerUnreachable, new_request_id
    from ebbtide.client.manager import AWAY_S

    # An answer may be lost: asked again, it is the same request.
    once, taken, lost = request_id or new_request_id(), False, False
    may_be = f"the manager may have taken it: `ebb task show {name}` shows it if so"
    with Steps(quiet=to.for_programs) as steps:

        async def begin(client: ManagerClient) -> ManagedTask:
            nonlocal lost
            try:
                return await client.submit_task(spec, request_id=once)
            except ManagerUnreachable as error:
                lost = lost or error.was_sent
                raise

        async def talk(client: ManagerClient) -> ManagedTask:
            nonlocal taken
            said = ""

            def tell(sentence: str) -> None:
                nonlocal said
                said = sentence
                steps(f"{name}: {said}")

            found = await asked_again(tell, begin, client, for_s=AWAY_S, only_lost=True)
            taken = True
            while wait and found.state not in _FINAL:
                if found.sentence != said:
                    tell(found.sentence)
                found = await asked_again(tell, client.task, name, LOOK_S)
            return found

        try:
            found = to.ask(talk)
        except KeyboardInterrupt:
            goes_on = f"it goes on: `ebb task show {name}` shows it; to end it: `ebb task cancel {name}`"
            raise Interrupted(f"interrupted; {goes_on if taken else may_be}") from None
        except EbbError as error:
            cause = error if is_away(error) else error.__cause__
            if taken or not lost or not is_away(cause):
                raise
            raise EbbError(f"{error}; {may_be}") from cause
    to.say(found, lambda: TASKS.print([found], wide=to.wide))
    if wait and found.state is not TaskState.DONE:
        raise OperationFailed(f"{name}: {found.sentence}")


def list_tasks(
    limit: Limit = 100,
    state: Annotated[TaskState | None, typer.Option(help="Only tasks in this state.")] = None,
    machine: Annotated[str | None, typer.Option(help="Only tasks that run, or ran last, there.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Only tasks whose names begin so.")] = None,
    *,
    to: Listing,
) -> None:
    """List the tasks, newest first."""
    wanted: dict[str, Any] = {"state": state, "machine": machine, "prefix": prefix}
    to.list("tasks", lambda client: client.tasks(limit, **wanted), TASKS, wanted.values())


def show(
    name: TaskName, wait_s: Annotated[float, seconds("Wait so long for its end.", 60)] = 0.0, *, to: Showing
) -> None:
    """Show one task."""
    found = to.ask(lambda client: client.task(name, wait_s))

    def told() -> None:
        TASKS.print([found], wide=to.wide)
        print(f"  command: {shown(' '.join(found.command))}")
        if found.output is not None:
            print(f"  output: {shown(found.output)}")

    to.say(found, told)


def output(
    name: TaskName,
    offset: Annotated[int, typer.Option(help="From this byte on; negative: so many before the end.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it has ended, or interrupted.")] = False,
    *,
    to: Asking,
) -> None:
    """Print what a task's last attempt prints. With -o json: one part of at most 64 KiB, or one a line to --follow."""
    if to.for_programs and not follow:
        found = to.ask(lambda client: client.task_output(name, offset))
        to.say(found, lambda: None)
        return

    def tell(part: TaskOutput) -> None:
        if to.for_programs:
            print_lines([to.line(part)])
        else:
            print(shown(part.text, keep="\n\t"), end="", flush=True)
            if reader_is_gone():
                raise BrokenPipeError

    # Who follows may stop; an output that was to be whole, and is not, is no success.
    ends = (BrokenPipeError, KeyboardInterrupt) if follow else (BrokenPipeError,)
    with contextlib.suppress(*ends):
        to.ask(lambda client: _parts(client, name, offset, follow, tell))


async def _parts(
    client: ManagerClient, name: str, offset: int, follow: bool, tell: Callable[[TaskOutput], None]
) -> None:
    """All parts up to the size at the first look; or on and on, also of later attempts, until the task has ended."""
    from ebbtide.client.errors import ManagerRefused

    async def ask(question: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
        return await (asked_again(print_error, question, *arguments) if follow else question(*arguments))

    if follow:
        # A manager that never was there is an error.
        await client.task(name)
    at, attempt, size, over = offset, 0, 0, False
    while True:
        try:
            part = await ask(client.task_output, name, at, PART)
        except ManagerRefused as error:
            if not follow or over or error.code is not ProblemCode.NO_OUTPUT:
                raise
            over = (await ask(client.task, name, LOOK_S)).state in _FINAL
            continue
        if part.attempt != attempt:
            again, attempt, size = attempt > 0, part.attempt, part.size
            if again:
                at = 0
                continue
        at = part.next_offset
        if part.text:
            await asyncio.to_thread(tell, part)
        if part.text and at < (part.size if follow else size):
            continue
        if not follow or part.state in _FINAL:
            return
        await ask(client.task, name, LOOK_S)


def explain(name: TaskName, *, to: Asking) -> None:
    """Say why a task waits, and what it waits for."""
    found = to.ask(lambda client: client.explain_task(name))
    to.say(found, lambda: _print_explanation(name, found))


def _print_explanation(name: str, found: TaskExplanation) -> None:
    print(shown(f"{name} is {found.task.state.value}: {found.sentence}"))
    if found.ahead:
        print(f"{found.ahead} waiting tasks get their turn before it")
    if found.offers:
        print_table(
            ("machine", "has room in", "expected to be done in", "counted as", "keeps its cores with"),
            (
                (
                    offer.machine,
                    f"{offer.wait_s:.0f} s",
                    f"{offer.expected_s:.0f} s",
                    f"{offer.compared_s:.0f} s",
                    "-" if offer.completion_probability is None else f"{offer.completion_probability:.2f}",
                )
                for offer in found.offers
            ),
            "",
        )


def cancel(name: TaskName, *, to: Asking) -> None:
    """Cancel a task, whether it has begun or not; harmless where it has ended."""
    found = to.ask(lambda client: client.cancel_task(name))
    to.say(found, lambda: TASKS.print([found], wide=to.wide))


def engine(*, to: Asking) -> None:
    """Show what runs the tasks, and its machines."""
    found = to.ask(lambda client: client.engine())
    to.say(found, lambda: _print_engine(found))


def _print_engine(found: EngineStatus) -> None:
    print(shown(f"{found.kind}: {found.sentence}"))
    print_table(
        ("machine", "up", "cores", "of", "others hold", "a VM of ours", "drained", "tasks"),
        (
            (
                row.name,
                "yes" if row.up else "no",
                row.cores,
                row.most_cores,
                row.foreign_cores,
                "yes" if row.known else "no",
                row.drained or "-",
                ", ".join(row.tasks) or "-",
            )
            for row in found.machines
        ),
        "it has no machines",
    )


def acquirer(*, to: Asking) -> None:
    """Show the harvest VMs that are kept for tasks, and why."""
    found = to.ask(lambda client: client.acquirer())
    to.say(found, lambda: _print_acquirer(found))


def _print_acquirer(found: AcquirerStatus) -> None:
    print(shown(found.sentence))
    if not found.on:
        return
    looks = "-" if found.next_at is None else clock(found.next_at)
    print(f"{found.wanted_cores} cores are wanted, {found.cores} are held; it looks again at {looks}")
    print_table(
        ("machine", "standing", "cores", "since", "unchanged", "tasks", "why"),
        (
            (
                row.name,
                row.standing.value,
                "-" if row.cores is None else row.cores,
                clock(row.came_at),
                "-" if row.unchanged_s is None else f"{row.unchanged_s:.0f} s",
                ", ".join(row.tasks) or "-",
                row.sentence,
            )
            for row in found.machines
        ),
        "it holds no machines",
    )
    for asked in found.requests:
        instead = f" in place of {asked.replaces}" if asked.replaces is not None else ""
        print(shown(f"asked for at {clock(asked.at)}{instead}: {asked.sentence}"))


TASKS: Table[ManagedTask] = Table(
    {
        "submitted": lambda task: clock(task.submitted_at),
        "name": lambda task: task.name,
        "state": lambda task: task.state,
        "machine": lambda task: task.machine or "-",
        "cores": lambda task: task.cores,
        "begun": lambda task: task.attempts,
        "broken off": lambda task: task.preemptions,
        "why": lambda task: task.sentence,
    },
    {
        "expected": lambda task: "-" if task.duration_s is None else f"{task.duration_s:g} s",
        "command": lambda task: " ".join(task.command),
    },
    "there are no tasks",
)

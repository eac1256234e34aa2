"""Commands about tasks: submit one, list, show, explain, cancel; and the engine that runs them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from pydantic import ValidationError

from ebbtide.cli.commands.options import Json, Limit, Manager, OperationFailed, TokenFile, ask, number, seconds
from ebbtide.cli.output import Steps, clock, print_json, print_table, shown
from ebbtide.errors import EbbError
from ebbtide.messages.common import problem_of
from ebbtide.messages.tasks import CheckpointSignal, ManagedTask, TaskSpec, TaskState

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

TaskName = Annotated[str, typer.Argument(metavar="NAME", help="The task's name.")]
#: Seconds between two looks of --wait.
LOOK_S: Final = 0.5
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
        float | None, seconds("How long it then needs to save its work; at most half of the VM's notice.")
    ] = None,
    request_id: Annotated[str | None, typer.Option(help="Makes a repeated submission harmless.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end; exit with 1 unless it is done.")] = False,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
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
    with Steps(quiet=json or not wait) as steps:

        async def talk(client: ManagerClient) -> ManagedTask:
            found = await client.submit_task(spec, request_id=request_id)
            said = ""
            while wait and found.state not in _FINAL:
                if found.sentence != said:
                    said = found.sentence
                    steps(f"{name}: {said}")
                await asyncio.sleep(LOOK_S)
                found = await client.task(name)
            return found

        found = ask(manager, token_file, talk)
    if json:
        print_json(found)
    else:
        print_tasks([found])
    if wait and found.state is not TaskState.DONE:
        raise OperationFailed(f"{name}: {found.sentence}")


def list_tasks(
    limit: Limit = 100,
    state: Annotated[TaskState | None, typer.Option(help="Only tasks in this state.")] = None,
    machine: Annotated[str | None, typer.Option(help="Only tasks that run, or ran last, there.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Only tasks whose names begin so.")] = None,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """List the tasks, newest first."""
    wanted: dict[str, Any] = {"state": state, "machine": machine, "prefix": prefix}
    found = ask(manager, token_file, lambda client: client.tasks(limit, **wanted))
    if json:
        print_json({"tasks": found})
    else:
        print_tasks(found)


def show(name: TaskName, manager: Manager = None, token_file: TokenFile = None, json: Json = False) -> None:
    """Show one task."""
    found = ask(manager, token_file, lambda client: client.task(name))
    if json:
        print_json(found)
        return
    print_tasks([found])
    print(f"  command: {shown(' '.join(found.command))}")
    if found.output is not None:
        print(f"  output: {shown(found.output)}")


def explain(name: TaskName, manager: Manager = None, token_file: TokenFile = None, json: Json = False) -> None:
    """Say why a task waits, and what it waits for."""
    found = ask(manager, token_file, lambda client: client.explain_task(name))
    if json:
        print_json(found)
        return
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


def cancel(name: TaskName, manager: Manager = None, token_file: TokenFile = None, json: Json = False) -> None:
    """Cancel a task, whether it has begun or not; harmless where it has ended."""
    found = ask(manager, token_file, lambda client: client.cancel_task(name))
    if json:
        print_json(found)
    else:
        print_tasks([found])


def engine(manager: Manager = None, token_file: TokenFile = None, json: Json = False) -> None:
    """Show what runs the tasks, and its machines."""
    found = ask(manager, token_file, lambda client: client.engine())
    if json:
        print_json(found)
        return
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


def acquirer(manager: Manager = None, token_file: TokenFile = None, json: Json = False) -> None:
    """Show the harvest VMs that are kept for tasks, and why."""
    found = ask(manager, token_file, lambda client: client.acquirer())
    if json:
        print_json(found)
        return
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


def print_tasks(found: Sequence[ManagedTask]) -> None:
    """Tasks as a table."""
    print_table(
        ("submitted", "name", "state", "machine", "cores", "begun", "broken off", "why"),
        (
            (
                clock(task.submitted_at),
                task.name,
                task.state.value,
                task.machine or "-",
                task.cores,
                task.attempts,
                task.preemptions,
                task.sentence,
            )
            for task in found
        ),
        "there are no tasks",
    )

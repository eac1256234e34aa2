"""`ebb wait`: until a VM, a host or a task is what is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from ebbtide.cli.commands import completion
from ebbtide.cli.commands.options import Asking, HostName, OperationFailed, VMName, seconds
from ebbtide.cli.output import Steps, shown
from ebbtide.errors import EbbError
from ebbtide.messages.hosts import HostStatus
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.messages.tasks import ManagedTask, TaskState
from ebbtide.messages.vms import ClusterVM

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

Thing = TypeVar("Thing", ClusterVM, HostStatus, ManagedTask)
TimeoutS = Annotated[float, seconds("For so long at the most; exit 1 if it is not so by then.", 86_400)]
#: Seconds between two looks.
LOOK_S: Final = 0.5


class OfVM(StrEnum):
    """What a VM may be waited for to be."""

    RUNNING = "running"
    CONNECTED = "connected"
    DEFLATED = "deflated"
    NOMINAL = "nominal"
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    GONE = "gone"


class OfHost(StrEnum):
    """What a host may be waited for to be."""

    READY = "ready"
    ACTIVE = "active"
    PAUSED = "paused"
    DRAINING = "draining"
    OFF = "off"
    SILENT = "silent"
    EMPTY = "empty"
    GONE = "gone"


class OfTask(StrEnum):
    """What a task may be waited for to be."""

    RUNNING = "running"
    DONE = "done"
    OVER = "over"


def is_vm(vm: ClusterVM, wanted: OfVM) -> bool:
    """Whether a VM is what is wanted."""
    smaller = not vm.nominal.vector().fits_in(vm.current.vector())
    match wanted:
        case OfVM.CONNECTED:
            return vm.guest_connected
        case OfVM.DEFLATED:
            return vm.state == "running" and smaller
        case OfVM.NOMINAL:
            return vm.state == "running" and not smaller
        case OfVM.PREEMPTED:
            return vm.preempted is not None
        case _:
            return vm.state == wanted.value


def is_host(host: HostStatus, wanted: OfHost) -> bool:
    """Whether a host is what is wanted."""
    match wanted:
        case OfHost.READY | OfHost.SILENT:
            return host.state == wanted.value
        case OfHost.EMPTY:
            return not host.vms
        case _:
            return host.mode.value == wanted.value


def is_task(task: ManagedTask, wanted: OfTask) -> bool:
    """Whether a task is what is wanted."""
    over = task.state in (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)
    return over if wanted is OfTask.OVER else task.state.value == wanted.value


def vm(
    name: VMName,
    wanted: Annotated[OfVM, typer.Option("--for", help="What it is to be.")],
    timeout_s: TimeoutS = 300.0,
    *,
    to: Asking,
) -> None:
    """Wait until a VM runs, its guest is connected, it is deflated, at its nominal size, off, preempted or gone."""
    # What is left of it on a silent host is removed as soon as that answers.
    hopeless = None if wanted is OfVM.GONE else "failed"
    _wait(to, name, wanted, timeout_s, lambda client: client.vm(name), lambda vm: is_vm(vm, wanted), hopeless)


def host(
    name: HostName,
    wanted: Annotated[OfHost, typer.Option("--for", help="What it is to be.")],
    timeout_s: TimeoutS = 300.0,
    *,
    to: Asking,
) -> None:
    """Wait until a host is ready, in a mode, silent, without VMs or gone."""
    _wait(to, name, wanted, timeout_s, lambda client: client.host(name), lambda host: is_host(host, wanted))


def task(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The task's name.", autocompletion=completion.tasks)],
    wanted: Annotated[OfTask, typer.Option("--for", help="What it is to be; over: done, failed or cancelled.")],
    timeout_s: TimeoutS = 300.0,
    *,
    to: Asking,
) -> None:
    """Wait until a task runs, is done, or is over however it ended."""

    def reached(task: ManagedTask) -> bool:
        if wanted is not OfTask.OVER and is_task(task, OfTask.OVER) and not is_task(task, wanted):
            raise OperationFailed(f"{name} is {task.state}: {task.sentence}")
        return is_task(task, wanted)

    _wait(to, name, wanted, timeout_s, lambda client: client.task(name), reached)


def _wait(
    to: Asking,
    name: str,
    wanted: StrEnum,
    timeout_s: float,
    question: Callable[[ManagerClient], Awaitable[Thing]],
    reached: Callable[[Thing], bool],
    hopeless: str | None = None,
) -> None:
    """Look until it is so, and print what was seen.

    :param hopeless: a state in which it will not be so.
    """
    state = away = ""

    async def look(client: ManagerClient, steps: Steps) -> Any:
        """What is wanted; None: it is not so yet."""
        nonlocal state, away
        from ebbtide.client.errors import PASSING, ManagerRefused

        try:
            found = await question(client)
        except PASSING as error:
            if not state:
                raise
            # It was there: it is awaited as well.
            if str(error) != away:
                away = str(error)
                steps(away)
            return None
        except ManagerRefused as error:
            if error.code is ProblemCode.NOT_FOUND and wanted == "gone":
                return {"name": name, "state": "gone"}
            raise
        if reached(found):
            return found
        if found.state == hopeless:
            raise OperationFailed(f"{name} is {found.state}: {getattr(found, 'sentence', '')}")
        if found.state != state or away:
            state, away = found.state, ""
            steps(f"waiting until {name} is {wanted}: it is {state}")
        return None

    async def looks(client: ManagerClient) -> Any:
        with Steps(quiet=to.for_programs) as steps:
            # Once in any case, and for as long as an answer takes.
            if (found := await look(client, steps)) is not None:
                return found
            async with asyncio.timeout(timeout_s):
                while found is None:
                    await asyncio.sleep(LOOK_S)
                    found = await look(client, steps)
        return found

    try:
        found = to.ask(looks)
    except TimeoutError:
        raise EbbError(f"{name} is not {wanted} after {timeout_s:g} s: {away or f'it is {state}'}") from None
    to.say(found, lambda: print(shown(f"{name} is {wanted}")))

"""How long an operation or a task is followed while its manager is away, in faked time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ebbtide.cli.commands import records, tasks
from ebbtide.cli.commands.options import Asking, Output, Showing
from ebbtide.cli.commands.vms import followed
from ebbtide.cli.main import app, exit_code_of
from ebbtide.client import (
    ClientError,
    ManagerBusy,
    ManagerClient,
    ManagerRefused,
    ManagerStandsBy,
    ManagerUnreachable,
)
from ebbtide.client.manager import AWAY_S
from ebbtide.errors import EbbError
from ebbtide.messages.common import Problem
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.messages.tasks import ManagedTask, TaskOutput, TaskSpec, TaskState
from tests.hostagent.faked_loop import FakedLoop

AWAY = ManagerUnreachable("no manager answers")
STARTING = ManagerStandsBy(503, "it does not lead yet")
BUSY = ManagerBusy(429, "more than 50 requests a second")
_SAID = "host-a cannot be reached"
HOST_AWAY = ManagerRefused(503, _SAID, None, Problem.of(503, _SAID, None, ProblemCode.HOST_UNAVAILABLE))
LOST = ManagerUnreachable("no manager answers: Server disconnected", was_sent=True)


class Away(ManagerClient):
    """A client whose manager is away from the first answer on, for so many seconds."""

    def __init__(self, seconds: float, error: ClientError) -> None:
        super().__init__("http://127.0.0.1:7100", "token")
        self._seconds = seconds
        self._error = error

    async def operation(self, request_id: str, wait_s: float = 0.0, host: str | None = None) -> Operation:
        if asyncio.get_running_loop().time() < self._seconds:
            raise self._error
        return told(OperationState.DONE)


def told(state: OperationState) -> Operation:
    return Operation(request_id="create-web", kind="create", state=state, started_at=1.0, sentence="placed web")


def follow(seconds: float, error: ClientError) -> Operation:
    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        return runner.run(Away(seconds, error).wait(told(OperationState.RUNNING), limit_s=None))


@pytest.mark.parametrize("error", [AWAY, STARTING, BUSY, HOST_AWAY])
def test_an_operation_is_followed_over_a_restart_of_its_manager(error: ClientError) -> None:
    assert follow(AWAY_S - 2.0, error).state is OperationState.DONE


@pytest.mark.parametrize("error", [AWAY, STARTING, BUSY, HOST_AWAY])
def test_a_manager_that_stays_away_is_said_to_be(error: ClientError) -> None:
    with pytest.raises(type(error)):
        follow(AWAY_S + 5.0, error)


def test_a_manager_that_held_its_answer_back_before_it_went_was_not_away_meanwhile() -> None:
    class Held(Away):
        async def operation(self, request_id: str, wait_s: float = 0.0, host: str | None = None) -> Operation:
            await asyncio.sleep(max(9.0 - asyncio.get_running_loop().time(), 0.0))
            return await super().operation(request_id, wait_s, host)

    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        ended = runner.run(Held(9.0 + AWAY_S - 2.0, AWAY).wait(told(OperationState.RUNNING), limit_s=None))
    assert ended.state is OperationState.DONE


class Asks(Asking):
    """A command whose manager, or host, does not come back."""

    error: ClientError = AWAY

    def ask(self, question: Callable[[ManagerClient], Awaitable[Any]]) -> Any:
        async def conversation() -> Any:
            return await question(Away(AWAY_S + 5.0, self.error))

        with asyncio.Runner(loop_factory=FakedLoop) as runner:
            return runner.run(conversation())


@pytest.mark.parametrize("taken", [True, False])
def test_a_command_says_of_an_operation_that_was_taken_on_that_it_goes_on(taken: bool) -> None:
    async def start(client: ManagerClient, request_id: str) -> Operation:
        if not taken:
            raise AWAY
        return told(OperationState.RUNNING)

    with pytest.raises(EbbError) as caught:
        followed(Asks(output=Output.JSON), start, "placing web", undo="ebb vm delete web --yes")
    goes_on = re.search("goes on: `ebb plan show create-web` .*: `ebb vm delete web --yes`", str(caught.value))
    assert str(caught.value).startswith(str(AWAY))
    assert (goes_on is not None) == taken


def test_a_command_says_that_it_is_the_host_that_does_not_answer_and_that_the_operation_goes_on() -> None:
    class OfHost(Asks):
        error = HOST_AWAY

    async def start(client: ManagerClient, request_id: str) -> Operation:
        return told(OperationState.RUNNING)

    with pytest.raises(EbbError, match=r"^host-a cannot be reached; the operation goes on: `ebb plan show create-web"):
        followed(OfHost(output=Output.JSON), start, "draining host-a", host="host-a")


def test_who_shows_a_hosts_operation_and_waits_for_it_goes_on_over_a_restart_of_its_agent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Shows(Showing):
        def ask(self, question: Callable[[ManagerClient], Awaitable[Any]]) -> Any:
            async def conversation() -> Any:
                return await question(Away(5.0, HOST_AWAY))

            with asyncio.Runner(loop_factory=FakedLoop) as runner:
                return runner.run(conversation())

    records.operation("create-web", 60.0, "host-a", to=Shows(output=Output.JSON))
    assert '"state": "done"' in capsys.readouterr().out
    with pytest.raises(ManagerRefused):
        records.operation("create-web", 0.0, "host-a", to=Shows(output=Output.JSON))


@pytest.mark.parametrize(("code", "ends"), [(ProblemCode.NO_OUTPUT, 1), (ProblemCode.NOT_FOUND, 3)])
def test_a_task_that_has_not_printed_yet_is_no_task_that_is_not_there(code: ProblemCode, ends: int) -> None:
    said = "train has not begun"
    assert exit_code_of(ManagerRefused(404, said, None, Problem.of(404, said, None, code))) == ends


def test_what_was_sent_and_not_answered_is_asked_for_again_under_its_request_id() -> None:
    ids: list[str] = []

    async def start(client: ManagerClient, request_id: str) -> Operation:
        ids.append(request_id)
        raise LOST if len(ids) == 1 else AWAY

    with pytest.raises(EbbError) as caught:
        followed(Asks(output=Output.JSON), start, "placing web")
    assert len(ids) > 1
    assert len(set(ids)) == 1
    assert str(caught.value) == (
        "no manager answers, and it was asked again for 30 s; "
        f"the manager may have taken it on: `ebb plan show {ids[0]}` shows it if so"
    )


class Leaves(ManagerClient):
    """A client whose manager answers, is away from the first second on, for a quarter of an hour, and has it done."""

    def __init__(self, error: ClientError) -> None:
        super().__init__("http://127.0.0.1:7100", "token")
        self._error = error

    def _state(self) -> TaskState:
        now = asyncio.get_running_loop().time()
        if 1.0 <= now < 900.0:
            raise self._error
        return TaskState.RUNNING if now < 1.0 else TaskState.DONE

    async def submit_task(self, spec: TaskSpec, *, request_id: str | None = None) -> ManagedTask:
        return await self.task(spec.name)

    async def task(self, name: str, wait_s: float = 0.0) -> ManagedTask:
        await asyncio.sleep(wait_s)
        state = self._state()
        return ManagedTask(
            name=name, state=state, cores=1, duration_s=None, restartable=False, max_attempts=5, command=("true",),
            attempts=1, preemptions=0, submitted_at=1.0, sentence=f"it is {state}",
        )  # fmt: skip

    async def task_output(self, name: str, offset: int = 0, limit: int = 65_536) -> TaskOutput:
        text = "begun\n" if (state := self._state()) is TaskState.RUNNING else "begun\nended\n"
        return TaskOutput(
            name=name, state=state, attempt=1, running=state is TaskState.RUNNING, text=text[offset:], offset=offset,
            next_offset=len(text), size=len(text),
        )  # fmt: skip


@pytest.mark.parametrize("error", [AWAY, STARTING, BUSY])
@pytest.mark.parametrize("follows", [False, True], ids=["submit --wait", "output --follow"])
def test_a_task_is_waited_for_however_long_its_manager_is_away_and_that_is_said_once(
    error: ClientError, follows: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    class AsksLeaving(Asking):
        def ask(self, question: Callable[[ManagerClient], Awaitable[Any]]) -> Any:
            with asyncio.Runner(loop_factory=FakedLoop) as runner:
                return runner.run(question(Leaves(error)))  # type: ignore[arg-type]

    if follows:
        tasks.output("train", follow=True, to=AsksLeaving())
    else:
        tasks.submit("train", ["true"], wait=True, to=AsksLeaving())
    said = capsys.readouterr()
    assert ("begun\nended\n" if follows else "it is done") in said.out
    assert said.err.count(f"{error}; it is asked again until it answers") == 1


class Prints(Leaves):
    """A client of a task that has ended and printed this."""

    def __init__(self, text: str) -> None:
        super().__init__(AWAY)
        self._text = text

    async def task_output(self, name: str, offset: int = 0, limit: int = 65_536) -> TaskOutput:
        return TaskOutput(
            name=name, state=TaskState.DONE, attempt=1, running=False, text=self._text[offset:], offset=offset,
            next_offset=len(self._text), size=len(self._text),
        )  # fmt: skip


def test_an_output_has_its_tabs_and_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    class AsksPrinting(Asking):
        def ask(self, question: Callable[[ManagerClient], Awaitable[Any]]) -> Any:
            return asyncio.run(question(Prints("a\tb\x1b[2J\r\n")))  # type: ignore[arg-type]

    tasks.output("train", to=AsksPrinting())
    assert capsys.readouterr().out == "a\tb\ufffd[2J\ufffd\n"


@pytest.mark.parametrize(("output", "read"), [(Output.JSON, json.loads), (Output.YAML, yaml.safe_load)])
def test_an_output_that_is_followed_comes_in_documents_of_its_form(
    output: Output, read: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    class AsksPrinting(Asking):
        def ask(self, question: Callable[[ManagerClient], Awaitable[Any]]) -> Any:
            return asyncio.run(question(Prints("a\tb\n")))  # type: ignore[arg-type]

    tasks.output("train", follow=True, to=AsksPrinting(output=output))
    text = capsys.readouterr().out
    assert read(text)["text"] == "a\tb\n"
    assert text.startswith("{" if output is Output.JSON else "---\n"), "so that each can be told from the next"


@pytest.mark.parametrize("follows", [False, True])
def test_an_output_that_ctrl_c_cuts_off_is_no_success_unless_it_was_followed(
    follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(to: Asking, question: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Asking, "ask", ask)
    words = ["task", "output", "train", *(["--follow"] if follows else [])]
    assert CliRunner().invoke(app, words).exit_code == (0 if follows else 130)

"""The client in a program that follows hundreds of VMs and operations at the same time."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from ebbtide.client import ManagerBusy, ManagerClient, ManagerUnreachable
from ebbtide.client.connection import MOST_HELD
from ebbtide.client.manager import LONGEST_POLL_S, POLLS_AT_ONCE, POLLS_PER_S
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.rest.rates import Buckets, Rate
from tests.hostagent.faked_loop import FakedLoop
from tests.waiting import AT_ONCE_S, until

#: More than an HTTP client opens connections by itself.
MANY = 101
#: What a token may ask a manager (`ebbtide.rest.rates`), and how long that waits at the most with an answer.
RATE = Rate(per_s=50.0, burst=200.0)


class Manager:
    """Its streams never tell anything, its answers about tasks are held back, all else is answered at once."""

    def __init__(self) -> None:
        self.streams = self.held = 0
        self.end = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/events/stream":
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            self.streams += 1
            await self.end.wait()
            return answer
        if request.path.startswith("/v1/tasks/"):
            self.held += 1
            await self.end.wait()
            return web.json_response(
                {
                    "name": request.path.rpartition("/")[2], "state": "done", "cores": 1, "duration_s": None,
                    "restartable": False, "max_attempts": 1, "command": ["true"], "attempts": 1, "preemptions": 0,
                    "submitted_at": 1.0, "sentence": "it has ended",
                }
            )  # fmt: skip
        return web.json_response({"status": "ok", "version": "0", "role": "leader"})


@asynccontextmanager
async def followed(manager: Manager) -> AsyncIterator[ManagerClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", manager.handle)
    server = TestServer(app)
    await server.start_server(shutdown_timeout=AT_ONCE_S)
    try:
        async with ManagerClient(f"http://127.0.0.1:{server.port}", "token") as client:
            yield client
    finally:
        await server.close()


async def test_each_stream_of_events_has_a_connection_that_is_no_other_calls() -> None:
    manager = Manager()
    async with followed(manager) as client:

        async def follow(vm: str) -> None:
            async for _ in client.follow_events(after=0, vm=vm):
                raise AssertionError("nothing is told")

        streams = [asyncio.create_task(follow(f"vm-{number}")) for number in range(MANY)]
        try:
            await until(lambda: manager.streams == MANY, "all streams to arrive", limit_s=15.0)
            assert (await client.health()).role == "leader"
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)


async def test_answers_that_are_held_back_keep_no_other_call_waiting_and_take_turns_themselves() -> None:
    manager = Manager()
    async with followed(manager) as client:
        waits = [asyncio.create_task(client.task(f"task-{number}", wait_s=60.0)) for number in range(MANY)]
        await until(lambda: manager.held == MOST_HELD, "as many as may be held back at a time")
        assert (await client.health()).role == "leader"
        assert manager.held == MOST_HELD
        manager.end.set()
        assert [task.name for task in await asyncio.gather(*waits)] == [f"task-{number}" for number in range(MANY)]


class Busy(ManagerClient):
    """A client of a manager in faked time that counts its requests, and refuses what is too much for a token."""

    def __init__(self, last_s: float) -> None:
        super().__init__("http://127.0.0.1:7100", "token")
        self.last_s = last_s
        self.buckets = Buckets()
        #: In which seconds requests came, those that were refused, too; and for how long a poll was to wait.
        self.asked: Counter[int] = Counter()
        self.polls: list[float] = []

    async def _request(self, method: str, path: str, *, held_s: float = 0.0, **options: Any) -> Any:
        clock = asyncio.get_running_loop().time

        async def once(url: str) -> Any:
            self.asked[int(clock())] += 1
            if (after_s := self.buckets.take("token", RATE, clock())) > 0:
                busy = ManagerBusy(429, "more than 50 requests a second")
                busy.after_s = float(math.ceil(after_s))
                raise busy
            self.polls.append(held_s)
            await asyncio.sleep(min(held_s, max(self.last_s - clock(), 0.0)))
            state = OperationState.RUNNING if clock() < self.last_s else OperationState.DONE
            return running(path.rpartition("/")[2], state).model_dump(mode="json")

        return await self._managers.ask(once)


def running(request_id: str, state: OperationState = OperationState.RUNNING) -> Operation:
    return Operation(request_id=request_id, kind="create", state=state, started_at=1.0, sentence="placing web")


def follow(number: int, last_s: float, told: list[str] | None = None) -> tuple[Busy, float]:
    """Follow so many operations that last for so long. Returns also when the last of them was known to have ended."""

    async def all_of_them() -> tuple[Busy, float]:
        client, progress = Busy(last_s), None if told is None else told.append
        waits = [client.wait(running(f"r{one}"), progress=progress) for one in range(number)]
        assert {one.state for one in await asyncio.gather(*waits)} == {OperationState.DONE}
        return client, asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        return runner.run(all_of_them())


def test_a_program_that_waits_for_600_operations_leaves_its_token_room_for_other_requests() -> None:
    client, known_at = follow(600, 60.0)
    assert max(client.asked.values()) <= POLLS_AT_ONCE + POLLS_PER_S
    assert max(client.asked[second] for second in range(30, 90)) <= POLLS_PER_S + 1
    assert len(client.polls) == sum(client.asked.values()), "none was refused"
    assert known_at < 90.0


def test_a_program_that_is_told_the_progress_of_600_operations_hears_of_their_end_as_soon() -> None:
    client, known_at = follow(600, 300.0, [])
    assert max(client.asked[second] for second in range(30, 330)) <= POLLS_PER_S + 1
    assert known_at < 330.0


def test_waits_that_were_given_up_take_no_turns_from_the_next_one() -> None:
    async def one_after_many() -> OperationState:
        client = Busy(60.0)
        many = [client.wait(running(f"r{one}"), limit_s=5.0) for one in range(1000)]
        assert {type(one) for one in await asyncio.gather(*many, return_exceptions=True)} == {TimeoutError}
        client.last_s = asyncio.get_running_loop().time() + 1.0
        return (await client.wait(running("next"), limit_s=3.0)).state

    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        assert runner.run(one_after_many()) is OperationState.DONE


def test_a_manager_was_not_away_while_a_poll_stood_in_line_behind_others() -> None:
    class Behind(ManagerClient):
        async def _request(self, method: str, path: str, **options: Any) -> Any:
            if path.startswith("/v1/tasks/"):
                await asyncio.sleep(60.0)
                raise ManagerUnreachable("no manager answers")
            if asyncio.get_running_loop().time() < 70.0:
                raise ManagerUnreachable("no manager answers")
            return running(path.rpartition("/")[2], OperationState.DONE).model_dump(mode="json")

    async def after_tasks() -> OperationState:
        client = Behind("http://127.0.0.1:7100", "token")
        tasks = [client.task(f"task-{number}", wait_s=60.0) for number in range(MOST_HELD)]
        *_, ended = await asyncio.gather(*tasks, client.wait(running("r"), limit_s=None), return_exceptions=True)
        assert isinstance(ended, Operation), ended
        return ended.state

    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        assert runner.run(after_tasks()) is OperationState.DONE


def test_the_end_of_one_operation_is_heard_at_once_and_asked_for_seldom() -> None:
    client, known_at = follow(1, 60.0)
    assert (known_at, len(client.polls)) == (60.0, 60.0 / LONGEST_POLL_S)


def test_progress_is_asked_for_every_second_at_first_and_then_a_tenth_of_the_time_late() -> None:
    client, known_at = follow(1, 300.0, [])
    assert client.polls[:10] == [1.0] * 10
    assert known_at == 300.0
    assert client.polls == sorted(client.polls)
    assert client.polls[-1] == LONGEST_POLL_S

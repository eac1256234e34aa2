"""The stream of events over real HTTP: everything once and in order, resumed by id; slow readers go, nobody waits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from cluster_manager.api import events as api_events
from cluster_manager.api.app import make_app
from cluster_manager.inventory import event_feed
from cluster_manager.inventory.event_feed import Listener
from ebbtide.messages.explanations import Event
from ebbtide.rest.access import Access
from ebbtide.rest.roles import Role
from ebbtide.rest.tokens import Principals, principal
from tests.manager.cluster import TOKEN, Cluster, cluster_of
from tests.manager.plan_events import report_of
from tests.waiting import until

each_store = pytest.mark.usefixtures("each_store")


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(event_feed, "LOOK_S", 0.02)
    async with cluster_of(tmp_path) as made:
        yield made


async def happen(cluster: Cluster, *sentences: str, kind: str = "placed", vm: str = "web") -> None:
    assert cluster.manager is not None
    for sentence in sentences:
        await cluster.manager.store.save_hosts([report_of("host-a")], [(kind, vm, "host-a", sentence)])


class Stream:
    """One reader, line by line."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def line(self) -> str:
        async with asyncio.timeout(20):
            return (await self.response.content.readline()).decode()

    async def events(self, number: int) -> list[Event]:
        found: list[Event] = []
        number_of: dict[str, str] = {}
        while len(found) < number:
            line = await self.line()
            assert line, "the stream has ended"
            name, _, value = line.strip().partition(": ")
            number_of[name] = value
            if name == "data":
                found.append(Event.model_validate_json(value))
                assert number_of["id"] == str(found[-1].id)
        return found

    async def rest(self) -> str:
        async with asyncio.timeout(20):
            return (await self.response.content.read()).decode()


@contextlib.asynccontextmanager
async def stream_of(cluster: Cluster, query: str = "", last: int | str | None = None) -> AsyncIterator[Stream]:
    assert cluster.server is not None
    headers = {"Authorization": f"Bearer {TOKEN}"} | ({} if last is None else {"Last-Event-ID": str(last)})
    url = str(cluster.server.make_url("/v1/events/stream")) + query
    async with cluster.session.get(url, headers=headers) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        stream = Stream(response)
        assert (await stream.line()).startswith(":")
        await stream.line()
        yield stream


def told(events: list[Event]) -> list[str]:
    return [event.sentence for event in events]


async def listening(cluster: Cluster, number: int) -> None:
    """Until so many have taken their place: what happens from then on is theirs."""
    assert cluster.manager is not None
    feed = cluster.manager.feed

    async def there() -> bool:
        return len(feed._listeners) == number and (number == 0 or feed._at is not None)

    await until(there)


@each_store
async def test_a_stream_tells_what_happens_from_now_on(cluster: Cluster) -> None:
    await happen(cluster, "before")
    async with stream_of(cluster) as stream:
        await listening(cluster, 1)
        await happen(cluster, "one", "two")
        assert told(await stream.events(2)) == ["one", "two"]
    await listening(cluster, 0)


@each_store
async def test_a_stream_goes_on_behind_the_last_event_that_was_seen(cluster: Cluster) -> None:
    await happen(cluster, *(f"event {number}" for number in range(1, 8)))
    async with stream_of(cluster, last=3) as stream:
        assert [event.id for event in await stream.events(4)] == [4, 5, 6, 7]
        await happen(cluster, "event 8")
        assert told(await stream.events(1)) == ["event 8"]
    async with stream_of(cluster, "?since_id=0") as stream:
        assert len(await stream.events(8)) == 8
    async with stream_of(cluster, "?since_id=0", last=6) as stream:
        assert [event.id for event in await stream.events(2)] == [7, 8]


@each_store
async def test_a_restart_of_the_manager_loses_no_event(cluster: Cluster) -> None:
    async with stream_of(cluster, "?since_id=0") as stream:
        await happen(cluster, "one")
        (seen,) = await stream.events(1)
        await cluster.kill_manager()
        assert "ended, the manager is shutting down" in await stream.rest()
    await cluster.start_manager()
    await happen(cluster, "two")
    async with stream_of(cluster, last=seen.id) as stream:
        assert told(await stream.events(1)) == ["two"]


@each_store
async def test_events_are_filtered(cluster: Cluster) -> None:
    async with stream_of(cluster, "?since_id=0&kind=preempted&vm=db") as stream:
        await listening(cluster, 1)
        await happen(cluster, "no", kind="placed", vm="db")
        await happen(cluster, "nor this", kind="preempted")
        await happen(cluster, "this", kind="preempted", vm="db")
        assert told(await stream.events(1)) == ["this"]
    async with stream_of(cluster, "?since_id=0&host=host-a&vm=db") as stream:
        assert told(await stream.events(2)) == ["no", "this"]


@each_store
async def test_every_reader_gets_everything_once_and_in_order_whenever_it_comes(cluster: Cluster) -> None:
    number = 300
    assert cluster.manager is not None

    async def read(after: int) -> list[int]:
        async with stream_of(cluster, f"?since_id={after}") as stream:
            return [event.id for event in await stream.events(number - after)]

    writing = asyncio.create_task(happen(cluster, *(f"event {n}" for n in range(number))), name="events")
    readers = []
    for after in (0, 10, 50, 100, 0):
        await until(partial(newest_above, cluster, after))
        readers.append(asyncio.create_task(read(after), name=f"reader behind {after}"))
    for reader, after in zip(readers, (0, 10, 50, 100, 0), strict=True):
        assert await reader == list(range(after + 1, number + 1))
    await writing


async def newest_above(cluster: Cluster, event_id: int) -> bool:
    assert cluster.manager is not None
    return await cluster.manager.feed.newest() >= event_id


@each_store
async def test_a_silent_stream_shows_that_it_lives(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_events, "HEARTBEAT_S", 0.05)
    async with stream_of(cluster) as stream:
        for _ in range(3):
            assert await stream.line() == ": still here\n"
            await stream.line()


@each_store
async def test_one_that_does_not_read_is_dropped_and_nobody_waits_for_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = api_events._write

    async def within(request: Any, response: Any, text: str) -> None:
        # A machine that stands still for a moment must not cost the other one its stream.
        async with asyncio.timeout(1.0 if request.headers["Host"] == "a" else 60.0):
            await write(request, response, text)

    monkeypatch.setattr(api_events, "WRITE_S", 60.0)
    monkeypatch.setattr(api_events, "_write", within)
    assert cluster.server is not None
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    small.connect(("127.0.0.1", cluster.server.port))
    reader, writer = await asyncio.open_connection(sock=small, limit=1024)
    writer.write(f"GET /v1/events/stream HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    await listening(cluster, 1)
    async with stream_of(cluster) as other:
        await listening(cluster, 2)
        # More than the buffers of both ends of a connection hold (the server's at most 4 MiB), in few transactions.
        long = "x" * 110_000
        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            group.create_task(happen(cluster, *([long] * 60)), name="events")
            assert len(await other.events(60)) == 60
        await listening(cluster, 1)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    del reader


@each_store
async def test_a_shutdown_ends_streams_at_once(cluster: Cluster) -> None:
    async with stream_of(cluster) as stream:
        await listening(cluster, 1)
        async with asyncio.timeout(10):
            await cluster.stop_manager()
            assert "ended" in await stream.rest()


@each_store
@pytest.mark.parametrize(
    ("query", "last", "field"),
    [("?kind=A", None, "kind"), ("?limit=1", None, "limit"), ("", "many", "Last-Event-ID"), ("?vm=Web", None, "vm")],
)
async def test_a_stream_that_cannot_be_is_refused_before_it_begins(
    cluster: Cluster, query: str, last: str | None, field: str
) -> None:
    headers = {} if last is None else {"Last-Event-ID": last}
    status, problem = await cluster.call("GET", f"/v1/events/stream{query}", headers=headers)
    assert (status, problem["field"]) == (400, field)


@each_store
async def test_without_a_token_there_is_no_stream(cluster: Cluster) -> None:
    assert (await cluster.call("GET", "/v1/events/stream", token="wrong"))[0] == 401


@each_store
@pytest.mark.parametrize("silent", [True, False])
async def test_a_stream_ends_with_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    monkeypatch.setattr(event_feed, "LOOK_S", 0.02)
    monkeypatch.setattr(api_events, "HEARTBEAT_S", 0.05 if silent else 60.0)
    people = [principal("leaving", Role.VIEWER, TOKEN), principal("staying", Role.VIEWER, "other")]
    access = Access(people)
    monkeypatch.setattr("tests.manager.cluster.make_app", lambda manager: make_app(manager, access))
    async with cluster_of(tmp_path) as cluster:
        async with stream_of(cluster) as stream:
            await listening(cluster, 1)
            # As SIGHUP does it; what is the same stays.
            access.principals = Principals([principal("leaving", Role.VIEWER, TOKEN)])
            await happen(cluster, "before")
            assert told(await stream.events(1)) == ["before"]
            with capture_logs() as logs:
                access.principals = Principals(people[1:])
                if not silent:
                    await happen(cluster, "after")
                assert "after" not in await stream.rest()
        await listening(cluster, 0)
    assert [entry["who"] for entry in logs if "a stream of events ends" in entry["event"]] == ["leaving"]


@each_store
async def test_the_client_follows_over_a_restart(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.client.manager.STREAM_PAUSE_S", 0.05)
    await happen(cluster, "before")
    found: list[str] = []
    client = cluster.client()

    async def follow() -> None:
        async with client:
            async for event in client.follow_events(after=0):
                found.append(event.sentence)

    following = asyncio.create_task(follow(), name="follower")
    try:
        await until(lambda: has(found, 1))
        await cluster.stop_manager()
        await cluster.start_manager()
        client.url = cluster.url
        await happen(cluster, "after")
        await until(lambda: has(found, 2))
        assert found == ["before", "after"]
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def has(found: list[Any], number: int) -> bool:
    return len(found) >= number


def event(number: int) -> Event:
    return Event(id=number, at=0.0, kind="placed", sentence="x")


async def test_a_listener_that_falls_behind_ends_and_keeps_nothing() -> None:
    listener = Listener(lambda event: True, behind=3)
    for number in range(1, 4):
        listener.offer(event(number))
    assert (await listener.next(0.0), listener.ended) == (event(1), "")
    listener.offer(event(4))
    listener.offer(event(5))
    assert "more than 3 events behind" in listener.ended
    assert (await listener.next(10.0), len(listener.waiting)) == (None, 0)


@each_store
async def test_readers_that_begin_long_ago_read_the_log_a_few_at_a_time_and_only_what_they_want(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one token with many streams keeps the manager from everything else; and goes on where it has hung up."""
    assert cluster.manager is not None
    monkeypatch.setattr(event_feed, "BATCH", 5)
    await happen(cluster, *(str(number) for number in range(30)))
    rows, at_work, most, read = cluster.manager.store.rows, 0, 0, 0

    async def counted(query: Any) -> Any:
        nonlocal at_work, most, read
        if "events.id >" not in str(query):
            return await rows(query)
        at_work += 1
        most = max(most, at_work)
        try:
            found = await rows(query)
        finally:
            at_work -= 1
        read += len(found)
        return found

    monkeypatch.setattr(cluster.manager.store, "rows", counted)
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(stream_of(cluster, "?since_id=0")) for _ in range(12)]
        for found in await asyncio.gather(*(stream.events(30) for stream in streams)):
            assert told(found) == [str(number) for number in range(30)]
    # And the feed's own look.
    assert most <= event_feed.REPLAYS + 1
    read = 0
    await happen(cluster, "at last", vm="another")
    async with stream_of(cluster, "?since_id=0&vm=another") as stream:
        assert told(await stream.events(1)) == ["at last"]
    assert read <= 3

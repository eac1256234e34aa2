"""Feed of the event log as it grows: one reader of the store hands every new event to all that listen.

A listener has a queue of bounded length. One that is read too slowly is dropped; the client comes back with the last
id that it has seen, and the store has the rest. Nothing that writes events waits for a reader.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import structlog

from cluster_manager.inventory.lists import event_of, position_of
from cluster_manager.store import queries
from cluster_manager.store.store import Store
from ebbtide.messages.explanations import Event

log = structlog.get_logger()

#: Seconds between two looks at the store, while a client listens.
LOOK_S: Final = 0.25
#: Rows of one look, and events that one listener may be behind.
BATCH: Final = 500
BEHIND: Final = 1000
#: Clients that read what was before at the same time: a log of a million events takes each of them seconds.
REPLAYS: Final = 2


class Listener:
    """One reader of the feed.

    :param wanted: which events it is for.
    :param filters: the same for `cluster_manager.store.queries.events_after`.
    :param gone: whether its client has hung up.
    """

    def __init__(
        self,
        wanted: Callable[[Event], bool],
        behind: int = BEHIND,
        filters: Mapping[str, str | None] = {},
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self.wanted = wanted
        self.filters = filters
        self.gone = gone
        self.behind = behind
        self.waiting: deque[Event] = deque()
        self.news = asyncio.Event()
        #: What was read from the store itself, up to this id; the feed may be behind that.
        self.seen = 0
        #: Why there will be no more; empty while there is.
        self.ended = ""

    def offer(self, event: Event) -> None:
        """Take an event, or end: it is read too slowly."""
        if self.ended or event.id <= self.seen or not self.wanted(event):
            return
        if len(self.waiting) >= self.behind:
            self.end(f"it is more than {self.behind} events behind")
        else:
            self.waiting.append(event)
            self.news.set()

    def forget_seen(self) -> None:
        """Of what waits, leave only what was not read from the store meanwhile."""
        while self.waiting and self.waiting[0].id <= self.seen:
            self.waiting.popleft()

    def end(self, why: str) -> None:
        """No more after this. What waits is forgotten: it can be had again by its id."""
        self.ended = self.ended or why
        self.waiting.clear()
        self.news.set()

    async def next(self, limit_s: float) -> Event | None:
        """The next event; None after ``limit_s`` without one, and at the end."""
        if not self.waiting and not self.ended:
            self.news.clear()
            try:
                async with asyncio.timeout(limit_s):
                    await self.news.wait()
            except TimeoutError:
                return None
        return self.waiting.popleft() if self.waiting else None


class EventFeed:
    """Follows the event log while a client listens."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listeners: set[Listener] = set()
        #: The last event that was handed out; None while no client listens.
        self._at: int | None = None
        self._listened = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._replays = asyncio.Semaphore(REPLAYS)

    def start(self) -> None:
        """Begin to follow."""
        self._task = asyncio.create_task(self._follow(), name="event feed")

    def hang_up(self) -> None:
        """End every listener; new ones end at once."""
        self._closed = True
        for listener in self._listeners:
            listener.end("the manager is shutting down")

    async def stop(self) -> None:
        """Cancel and await the task."""
        self.hang_up()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def listen(self, listener: Listener, after: int | None) -> AsyncIterator[Event]:
        """Add a listener and read what came after an event; what comes from now on waits in the listener.

        :param after: an event's id; None: only what comes from now on.
        """
        self._listeners.add(listener)
        if self._closed:
            listener.end("the manager is shutting down")
        newest = await self.newest()
        if self._at is None:
            self._at = newest
        self._listened.set()
        listener.seen = newest if after is None else after
        while rows := await self._replayed(listener):
            for event in map(event_of, rows):
                listener.seen = event.id
                yield event
            if listener.ended:
                return
            listener.forget_seen()
        listener.forget_seen()

    async def _replayed(self, listener: Listener) -> Sequence[Any]:
        """The next rows that a listener wants of what was before it came."""
        async with self._replays:
            # Who hung up while it waited costs nothing more.
            if listener.gone():
                return ()
            return await self._store.rows(queries.events_after(listener.seen, BATCH, **listener.filters))

    def leave(self, listener: Listener) -> None:
        """Forget a listener."""
        self._listeners.discard(listener)
        if not self._listeners:
            self._at = None
            self._listened.clear()

    async def newest(self) -> int:
        """The id of the latest event; 0 where there is none."""
        return await position_of(self._store)

    async def _follow(self) -> None:
        while True:
            await self._listened.wait()
            try:
                await self._look()
            except Exception:
                log.exception("the event log could not be read; the next look is in a moment")
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        while (at := self._at) is not None:
            rows = await self._store.rows(queries.events_after(at, BATCH))
            if not rows or self._at != at:
                return
            for event in map(event_of, rows):
                for listener in self._listeners:
                    listener.offer(event)
                self._at = event.id
            if len(rows) < BATCH:
                return

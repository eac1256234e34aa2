"""The client for programs without asyncio: the same calls, one after the other."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from ebbtide.client.manager import ManagerClient

T = TypeVar("T")


class SyncManagerClient:
    """One conversation with a manager, each call of which is waited for. Use as a context manager, in one thread.

    Parameters and errors are those of `ManagerClient`, whose methods are called by ``do`` and ``each``:
    ``manager.do(lambda m: m.vm("web"))``. Not within a running event loop: there is ManagerClient itself.
    """

    def __init__(self, url: str, token: str, *, tls: ssl.SSLContext | None = None) -> None:
        self._client = ManagerClient(url, token, tls=tls)
        self._stack = ExitStack()
        self._runner: asyncio.Runner | None = None

    def __enter__(self) -> Self:
        self._runner = self._stack.enter_context(asyncio.Runner())
        self._runner.run(self._client.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            self._run(self._client.__aexit__(kind, error, trace))

    def do(self, ask: Callable[[ManagerClient], Coroutine[Any, Any, T]]) -> T:
        """One call and its answer."""
        return self._run(ask(self._client))

    def each(self, ask: Callable[[ManagerClient], AsyncIterator[T]]) -> Iterator[T]:
        """What a call yields, such as `ManagerClient.follow_events`; each is waited for when it is asked for."""
        rows = ask(self._client)
        try:
            while True:
                try:
                    yield self._run(_next(rows))
                except StopAsyncIteration:
                    return
        finally:
            if (close := getattr(rows, "aclose", None)) is not None:
                self._run(close())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._runner is None:
            work.close()
            raise RuntimeError("SyncManagerClient is used outside of its context")
        return self._runner.run(work)


async def _next(rows: AsyncIterator[T]) -> T:
    return await anext(rows)

"""An event loop in faked time on which threads are faked, too: nothing outside the loop changes the order of events."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

#: How long work in a thread takes, in faked seconds: others have their turn meanwhile.
THREAD_S = 0.002


class _NoFiles(selectors.SelectSelector):
    """A selector that waits for no file: where the loop would wait for time, time passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing is left that could ever happen"
        self.now += timeout
        return []


class FakedLoop(asyncio.SelectorEventLoop):
    """Time jumps to the next timer as soon as nothing else is to do."""

    def __init__(self) -> None:
        self._files = _NoFiles()
        super().__init__(self._files)
        #: What went wrong in a task that nobody waited for.
        self.complaints: list[str] = []
        self.set_exception_handler(lambda _, context: self.complaints.append(_told(context)))

    def time(self) -> float:
        return self._files.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run at once; whoever waits hears of it a little later."""
        future = self.create_future()
        try:
            result, error = func(*args), None
        except Exception as caught:
            result, error = None, caught

        def end() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(THREAD_S, end)
        return future


def _told(context: dict[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"

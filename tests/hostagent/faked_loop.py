"""An event loop in faked time on which threads are faked, too: nothing outside the loop changes the order of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from looptime import LoopTimeEventLoop

#: How long work in a thread takes, in faked seconds: others have their turn meanwhile.
THREAD_S = 0.002


class FakedLoop(LoopTimeEventLoop, asyncio.SelectorEventLoop):
    """Time jumps to the next timer as soon as nothing else is to do."""

    def __init__(self) -> None:
        super().__init__(noop_cycles=0)
        #: What went wrong in a task that nobody waited for.
        self.complaints: list[str] = []
        self.set_exception_handler(lambda _, context: self.complaints.append(_told(context)))

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

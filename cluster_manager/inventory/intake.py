"""Intake of reports: one at a time is read, and while commands are under way few are, so that these go first.

Reading a report takes the loop a millisecond, and a placement goes through the loop some dozens of times: with a
hundred reports at hand it waited for all of them each time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

#: Between two reports that are read while a command is under way, seconds: a fifth of the loop's time is theirs.
PAUSE_S: Final = 0.005
#: The same for one that is the host's last one once more, which costs a fifth.
REPEATED_PAUSE_S: Final = 0.001
#: A command holds reports back for so long after each of its steps, seconds: what takes longer waits for others itself.
HOLD_S: Final = 0.25


class Intake:
    """Turns of reports, and the commands that go before them."""

    def __init__(self) -> None:
        self._turns = asyncio.Lock()
        #: Until when each command holds reports back, by the loop's clock.
        self._held_until: dict[str, float] = {}
        self._free = asyncio.Event()

    def begin(self, command: str) -> None:
        """A command begins, or goes on with its next step."""
        self._held_until[command] = asyncio.get_running_loop().time() + HOLD_S
        self._free.clear()

    def end(self, command: str) -> None:
        """A command is over, or waits."""
        self._held_until.pop(command, None)
        if not self._held_until:
            self._free.set()

    @contextlib.asynccontextmanager
    async def turn(self, urgent: bool, pause_s: float = PAUSE_S) -> AsyncIterator[None]:
        """Held while one report is read.

        :param urgent: its host counts as silent soon: it does not wait for commands.
        """
        async with self._turns:
            await (asyncio.sleep(0) if urgent else self.give_way(pause_s))
            yield

    @property
    def commanded(self) -> bool:
        """Whether a command holds reports back."""
        return max(self._held_until.values(), default=0.0) > asyncio.get_running_loop().time()

    async def give_way(self, pause_s: float = PAUSE_S) -> None:
        """Let commands that are under way go first, for a moment; others in any case."""
        now = asyncio.get_running_loop().time()
        until = min(now + pause_s, max(self._held_until.values(), default=now))
        if until <= now:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._free.wait()

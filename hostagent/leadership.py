"""Whose commands the agent takes: those of the manager that leads, in the order in which it gave them."""

from __future__ import annotations

import asyncio

from deflation.fencing import Fence
from deflation.messages import Command
from hostagent.errors import RequestRefused
from hostagent.journal import Journal


class Leadership:
    """The latest command that was seen. Its epoch outlives the agent, in the journal.

    The order of commands ends with this process, as the connections do on which they could come late.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._fence = Fence()

    async def follow(self, command: Command, known: bool = False) -> None:
        """Refuse a manager whose leadership is over and a command that comes too late; remember the latest.

        :param known: it has been taken already, so that it can be overtaken by nothing: its repetition does nothing.
        :raises RequestRefused: the epoch, or within it the order, is lower than one that was seen.
        """
        fence = self._fence.after(self._journal.epoch)
        why, field = fence.refusal(command.epoch, 0 if known else command.order)
        if why:
            raise RequestRefused(409, why, field)
        self._fence = fence.after(command.epoch, command.order)
        await self.follow_epoch(command.epoch)

    async def follow_epoch(self, epoch: int) -> None:
        """Remember the epoch of a manager that leads: from now on a lower one is refused."""
        if epoch > self._journal.epoch:
            await asyncio.to_thread(self._journal.raise_epoch, epoch)

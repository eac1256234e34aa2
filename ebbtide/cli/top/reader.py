"""Reader of the manager for `ebb top`: its stream of events, and every two seconds what of its lists has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ebbtide.cli.top.model import Top
from ebbtide.errors import EbbError
from ebbtide.messages.problem_codes import ProblemCode

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

#: Seconds between two questions, and two pictures.
STEP_S: Final = 2.0
#: Events of before that are shown at first.
EARLIER: Final = 50


class Reader:
    """Keeps a model up to date.

    :param draw: is called after each step.
    """

    def __init__(self, client: ManagerClient, top: Top, draw: Callable[[], None]) -> None:
        self._client = client
        self._top = top
        self._draw = draw
        #: Something is wanted at once: the layers of another VM.
        self.hurry = asyncio.Event()

    async def look(self) -> None:
        """Ask once for what has changed. Raises EbbError."""
        is_first = self._top.hosts_since == 0
        self._top.put_hosts(await self._client.changed_hosts(self._top.hosts_since))
        if is_first:
            # There are more VMs, which take longer.
            self._draw()
        self._top.put_vms(await self._client.changed_vms(self._top.vms_since))

    async def earlier_events(self) -> int:
        """Ask for the latest events; returns the id of the last one. Raises EbbError."""
        events = await self._client.events(EARLIER)
        for event in reversed(events):
            self._top.put_event(event)
        return events[0].id if events else 0

    async def run(self) -> None:
        """Go on until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._steps(), name="ebb top: lists")
            group.create_task(self._follow(), name="ebb top: events")

    async def _steps(self) -> None:
        while True:
            try:
                if not self.hurry.is_set():
                    await self.look()
                self.hurry.clear()
                await self._look_at_layers()
            except EbbError as error:
                self._top.fail(str(error))
            self._draw()
            try:
                async with asyncio.timeout(STEP_S):
                    await self.hurry.wait()
            except TimeoutError:
                pass

    async def _look_at_layers(self) -> None:
        name = self._top.detail
        if name is not None:
            try:
                self._top.put_layers(name, await self._client.explain(name))
            except EbbError as error:
                self._top.put_layers(name, str(error))

    async def _follow(self) -> None:
        """Events are drawn with the next step."""
        last: int | None = None
        while True:
            try:
                if last is None:
                    last = await self.earlier_events()
                async for event in self._client.follow_events(after=last):
                    last = event.id
                    self._top.put_event(event)
            except EbbError as error:
                self._top.fail(str(error))
                if getattr(error, "code", None) == ProblemCode.AHEAD_OF_LOG:
                    # A store that was put back to an earlier state counts from there.
                    last = None
            await asyncio.sleep(STEP_S)

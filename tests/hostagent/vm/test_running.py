"""A deflation that is stopped leaves no request for memory standing that the host has not heard the end of."""

from __future__ import annotations

import asyncio
from typing import Any

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import (
    ApplicationAnswered,
    AskApplication,
    Event,
    GuestReading,
    Instruction,
    Measured,
    PollApplication,
    Unplug,
)
from ebbtide.deflation.resources import ResourceVector
from hostagent.vm.running import Interrupt, run

FULL = Bound(1, None, 512, 512)


class Promised:
    """An executor whose guest gives a first step by its word; its application never ends."""

    def __init__(self) -> None:
        self.asked_for_more = False
        self.called_off = 0
        self.waits = asyncio.Event()
        self._spare_mib = 300.0
        self._total_mib = 1000.0

    async def carry_out(self, instruction: Instruction) -> Event:
        match instruction:
            case AskApplication():
                return ApplicationAnswered(0.0, instruction.step, ResourceVector(memory_mib=400))
            case PollApplication():
                self.waits.set()
                await asyncio.Event().wait()
            case Unplug(until_total_mib=float(total_mib)):
                self.asked_for_more = True
                self._spare_mib, self._total_mib = 0.0, total_mib
        return Measured(0.0, instruction.step, *await self.measure())

    async def measure(self) -> tuple[Bound, GuestReading]:
        return FULL, GuestReading((0,), (), self._spare_mib, total_mib=self._total_mib)

    async def call_off(self) -> None:
        self.called_off += 1
        self.asked_for_more = False


async def test_what_the_guest_was_asked_for_is_called_off_with_the_deflation() -> None:
    executor, interrupt = Promised(), Interrupt()
    asked: Any = executor
    task = asyncio.create_task(run(Cascade(FULL, ResourceVector(1, 500), 60.0), asked, interrupt))
    async with asyncio.timeout(10):
        await executor.waits.wait()
        while not executor.asked_for_more:
            await asyncio.sleep(0)
        interrupt.ask("the guest is under pressure")
        outcome = await task
    assert executor.called_off == 1
    assert outcome.after == FULL

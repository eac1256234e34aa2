"""Driver of a state machine of `ebbtide.deflation` on one VM: carries out its instructions until it has finished."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import (
    Finish,
    Instruction,
    Measured,
    Outcome,
    ReadGuest,
    Stopped,
    Throttle,
    Unplug,
)
from ebbtide.deflation.cascade.reinflation import Reinflation
from hostagent.errors import HypervisorError
from hostagent.vm.executor import Executor

log = structlog.get_logger()


class Interrupt:
    """Stops the deflation that is under way, with a reason. One that is asked for in advance stops it at its start."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self.reason = ""

    def ask(self, reason: str) -> None:
        self.reason = reason
        self._asked.set()

    def clear(self) -> None:
        self.reason = ""
        self._asked.clear()

    async def wait(self) -> None:
        await self._asked.wait()


async def run(machine: Cascade | Reinflation, executor: Executor, interrupt: Interrupt) -> Outcome:
    """Carry a deflation or reinflation out to its end.

    Interrupted, the instruction under way is called off, what it did is read, and the machine is told to stop. An
    instruction that fails raises nothing: it is answered with its reason.
    """
    stopping = asyncio.create_task(interrupt.wait(), name="interrupt")
    try:
        pending: list[Instruction] = machine.start(_now())
        while True:
            (instruction,) = pending
            if isinstance(instruction, Finish):
                return instruction.outcome
            log.debug("step", machine=type(machine).__name__, instruction=str(instruction))
            working = asyncio.create_task(executor.carry_out(instruction), name=f"step:{type(instruction).__name__}")
            try:
                await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
                raise
            if working.done():
                pending = machine.handle(working.result())
                continue
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            pending = []
            if isinstance(instruction, ReadGuest | Unplug | Throttle):
                with contextlib.suppress(HypervisorError):
                    bound, guest = await executor.measure()
                    pending = machine.handle(Measured(_now(), instruction.step, bound, guest))
            if not (pending and isinstance(pending[0], Finish)):
                pending = machine.handle(Stopped(_now(), instruction.step, interrupt.reason))
    finally:
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)


def _now() -> float:
    """The event loop's clock, so that tests can fake it."""
    return asyncio.get_running_loop().time()

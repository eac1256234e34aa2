"""Driver of a state machine of `ebbtide.deflation` on one VM: carries out its instructions until it has finished."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

import structlog

from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.instructions import (
    Event,
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
from hostagent.clock import now as _now
from hostagent.errors import HypervisorError
from hostagent.vm.executor import Executor
from hostagent.vm.step_spans import StepSpans

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
    """Carry a deflation or reinflation out to its end: all that it instructs, at once.

    Interrupted, the instructions under way are called off, what they did is read, and the machine is told to stop. An
    instruction that fails raises nothing: it is answered with its reason.
    """
    stopping = asyncio.create_task(interrupt.wait(), name="interrupt")
    working: dict[asyncio.Task[Event], Instruction] = {}
    spans, outcome = StepSpans(), None
    try:
        pending = machine.start(_now())
        while True:
            if (outcome := _outcome(pending)) is not None:
                return outcome
            for instruction in pending:
                log.debug("step", machine=type(machine).__name__, instruction=str(instruction))
                name = f"step:{type(instruction).__name__}"
                working[asyncio.create_task(spans.carry_out(executor, instruction), name=name)] = instruction
            await asyncio.wait({*working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            # One by one: what the answer of one begins may change what the answer of another counts for.
            answered = next((task for task in working if task.done()), None)
            if answered is not None:
                del working[answered]
                pending = machine.handle(answered.result())
                continue
            await _call_off(working)
            outcome = await _stopped(machine, executor, list(working.values()), interrupt.reason)
            return outcome
    finally:
        await _call_off([*working, stopping])
        spans.end(outcome)


async def _call_off(tasks: Iterable[asyncio.Task[Any]]) -> None:
    called_off = [task for task in tasks if not task.done() and task.cancel()]
    await asyncio.gather(*called_off, return_exceptions=True)


async def _stopped(
    machine: Cascade | Reinflation, executor: Executor, called_off: list[Instruction], reason: str
) -> Outcome:
    """The outcome by what the instructions that were called off have done, as far as it can be read."""
    last = called_off[-1]
    if executor.asked_for_more:
        with contextlib.suppress(HypervisorError):
            await executor.call_off()
    moved = [one for one in called_off if isinstance(one, ReadGuest | Unplug | Throttle)]
    if moved:
        with contextlib.suppress(HypervisorError):
            bound, guest = await executor.measure()
            for instruction in moved:
                # What this would begin is not carried out.
                if (outcome := _outcome(machine.handle(Measured(_now(), instruction.step, bound, guest)))) is not None:
                    return outcome
    outcome = _outcome(machine.handle(Stopped(_now(), last.step, reason)))
    assert outcome is not None, "a machine that is told to stop has finished"
    return outcome


def _outcome(instructions: list[Instruction]) -> Outcome | None:
    return next((one.outcome for one in instructions if isinstance(one, Finish)), None)

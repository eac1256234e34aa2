"""A host agent over the make-believe host that kills itself with SIGKILL at a given state of its state machines.

Usage: python -m tests.faults.staged_agent WORLD_SOCKET STATE_DIR PORT [MACHINE PHASE MOMENT | Hello SECONDS]

MACHINE: Cascade or Reinflation. PHASE: one, or two that overlap, with a plus. MOMENT: ``entered`` (the phase is
reached, what it instructs is not begun) or ``answered`` (it has been carried out, the machine has not heard of it).
MACHINE Hypervisor: PHASE is a call, MOMENT before or after it. ``Hello SECONDS`` instead: it lives, and waits so long
for a guest before it goes on with what an earlier one has begun.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ebbtide.deflation.cascade.cascade import Cascade
from ebbtide.deflation.cascade.reinflation import Reinflation
from ebbtide.rest.logs import configure_logs
from hostagent.control import reconciler
from hostagent.operations import resuming
from hostagent.vm import guest_link
from tests.hostagent.agent_process import run
from tests.hostagent.fake_hypervisor import FakeHypervisor

MACHINES: dict[str, Any] = {"Cascade": Cascade, "Reinflation": Reinflation}


def die_at(machine: Any, phase: str, moment: str) -> None:
    """Wrap both ways into a machine, so that the process ends there as by kill -9."""
    start, handle = machine.start, machine.handle

    deadly = set(phase.split("+"))

    def check(phases: Iterable[Any], now: str) -> None:
        if deadly <= {one.value for one in phases} and now == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def entered(self: Any) -> Iterable[Any]:
        return self.phases if isinstance(self, Cascade) else (self.phase,)

    def answered(self: Any, event: Any) -> Iterable[Any]:
        if not isinstance(self, Cascade):
            return (self.phase,)
        # What is answered counts, and, where two are to be under way, what is so besides.
        one = self._under_way.get(event.step)
        return () if one is None else self.phases if len(deadly) > 1 else (one.phase,)

    def started(self: Any, now: float) -> Any:
        check(entered(self), "entered")
        instructions = start(self, now)
        check(entered(self), "entered")
        return instructions

    def handled(self: Any, event: Any) -> Any:
        check(answered(self, event), "answered")
        instructions = handle(self, event)
        check(entered(self), "entered")
        return instructions

    machine.start, machine.handle = started, handled


def die_at_call(deadly: str, moment: str) -> None:
    """The same before or after a call of the hypervisor."""
    call = FakeHypervisor._call

    async def called(self: FakeHypervisor, method: str, **params: Any) -> Any:
        if (method, moment) == (deadly, "entered"):
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await call(self, method, **params)
        if (method, moment) == (deadly, "answered"):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    FakeHypervisor._call = called  # type: ignore[method-assign]


def main() -> None:
    configure_logs()
    reconciler.SURVEY_S = reconciler.CHECK_S = guest_link.RETRY_S = 0.2  # type: ignore[misc]
    if sys.argv[4:5] == ["Hypervisor"]:
        die_at_call(*sys.argv[5:])
    elif sys.argv[4:5] == ["Hello"]:
        resuming.HELLO_S = float(sys.argv[5])  # type: ignore[misc]
    elif sys.argv[4:]:
        die_at(MACHINES[sys.argv[4]], sys.argv[5], sys.argv[6])
    asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))


if __name__ == "__main__":
    main()

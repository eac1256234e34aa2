"""Spans of what a state machine instructs on one VM: one a step, beneath one a layer, which has the layer's ledger."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from ebbtide.deflation.cascade.instructions import (
    ApplicationAnswered,
    ApplicationReported,
    AskApplication,
    ColdReclaimed,
    Event,
    Instruction,
    Measured,
    Outcome,
    PollApplication,
    ReclaimCold,
    Throttle,
    Unplug,
)
from ebbtide.deflation.cascade.reinflation import TellApplication, Told
from ebbtide.deflation.ledger import Layer, LedgerEntry
from ebbtide.deflation.resources import ResourceVector
from ebbtide.tracing.spans import Span, Value, beneath, current, span
from hostagent.vm.executor import Executor

_LAYERS: Final[tuple[tuple[type[Instruction], Layer], ...]] = (
    (AskApplication, Layer.APPLICATION),
    (PollApplication, Layer.APPLICATION),
    (TellApplication, Layer.APPLICATION),
    (ReclaimCold, Layer.COLD),
    (Unplug, Layer.GUEST),
    (Throttle, Layer.HYPERVISOR),
)
_BASE: Final = {field.name for field in fields(Instruction)}


class StepSpans:
    """Of one deflation or reinflation."""

    def __init__(self) -> None:
        self._layers: dict[Layer, Span] = {}
        #: When the last step of a layer ended, nanoseconds since the epoch.
        self._ended_ns: dict[Layer, int] = {}

    async def carry_out(self, executor: Executor, instruction: Instruction) -> Event:
        """Carry an instruction out, in a span of its own."""
        if current() is None:
            return await executor.carry_out(instruction)
        layer = next((layer for kind, layer in _LAYERS if isinstance(instruction, kind)), None)
        if layer is not None and layer not in self._layers:
            self._layers[layer] = span(f"layer {layer.value}", layer=layer.value)
        name = f"step {type(instruction).__name__}"
        try:
            with beneath(self._layers[layer], name) if layer is not None else span(name) as one:
                one.set(**_asked(instruction))
                event = await executor.carry_out(instruction)
                one.set(**_answered(event))
                return event
        finally:
            if layer is not None:
                self._ended_ns[layer] = time.time_ns()

    def end(self, outcome: Outcome | None) -> None:
        """The layers have done.

        :param outcome: None: it was broken off.
        """
        for layer, one in self._layers.items():
            entries = [entry for entry in outcome.ledger if entry.layer is layer] if outcome is not None else []
            one.set(**ledger_of(entries))
            one.end(self._ended_ns.get(layer))


def ledger_of(entries: Sequence[LedgerEntry]) -> dict[str, Value]:
    """A layer's entries as attributes, by resource."""
    return {
        f"{entry.resource}__{name}": value
        for entry in entries
        for name, value in (
            ("asked", entry.asked),
            ("promised", entry.promised),
            ("verified", entry.verified),
            ("seconds", round(entry.seconds, 3)),
            ("reason", entry.reason),
        )
    }


def _asked(instruction: Instruction) -> dict[str, Value]:
    """What an instruction asks for: its own figures."""
    said: dict[str, Value] = {"limit_s": round(instruction.limit_s, 3)}
    for field in fields(instruction):
        value = getattr(instruction, field.name)
        if field.name in _BASE or value is None:
            continue
        said[f"asked__{field.name}"] = value if isinstance(value, bool | int | float) else _text(value)
    return said


def _answered(event: Event) -> dict[str, Value]:
    """What an event says."""
    match event:
        case Measured(bound=bound, reason=reason, error=error):
            held = {"bound": str(bound.size)} if bound is not None else {}
            return {**held, "reason": reason, "error": error}
        case ApplicationAnswered(promised=promised, reason=reason):
            return {"promised": str(promised), "reason": reason}
        case ApplicationReported(relinquished=relinquished, done=done, reason=reason):
            return {"relinquished": str(relinquished), "done": done, "reason": reason}
        case ColdReclaimed(freed_mib=freed_mib, done=done, reason=reason):
            return {"freed_mib": freed_mib, "done": done, "reason": reason}
        case Told(reason=reason):
            return {"reason": reason}
    return {}


def _text(value: object) -> str:
    if isinstance(value, ResourceVector):
        return str(value)
    return ", ".join(str(part) for part in value) if isinstance(value, tuple) else str(value)

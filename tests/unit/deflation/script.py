"""Tables of instructions and answers: what a state machine must say, in part, and what it is told next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import (
    ApplicationAnswered,
    ApplicationReported,
    Event,
    Finish,
    GuestReading,
    Instruction,
    Measured,
    Outcome,
)
from ebbtide.deflation.cascade.reinflation import Told
from ebbtide.deflation.ledger import Layer, LedgerEntry
from ebbtide.deflation.resources import ZERO, ResourceVector


class Machine(Protocol):
    """Cascade and reinflation."""

    def start(self, now: float) -> list[Instruction]: ...

    def handle(self, event: Event) -> list[Instruction]: ...


@dataclass(frozen=True)
class Row:
    """An instruction that must come, with these fields, and its answer after ``takes_s``."""

    expected: type[Instruction]
    fields: dict[str, Any]
    answer: type[Event]
    says: dict[str, Any] = field(default_factory=dict)
    takes_s: float = 0.0


def check(instruction: Instruction, expected: type[Instruction], fields: dict[str, Any]) -> None:
    """A partial match."""
    assert type(instruction) is expected, f"{instruction} is no {expected.__name__}"
    for name, value in fields.items():
        assert getattr(instruction, name) == value, f"{name} of {instruction}"


def _fits(instruction: Instruction, row: Row) -> bool:
    return type(instruction) is row.expected and all(
        getattr(instruction, name) == value for name, value in row.fields.items()
    )


def play(machine: Machine, rows: list[Row], now: float = 100.0) -> Outcome:
    """Play a table to its end. Of several instructions under way, a row answers the one that is like it."""
    under_way = machine.start(now)
    for row in rows:
        fitting = [one for one in under_way if _fits(one, row)]
        instruction = next(iter(fitting or under_way))
        check(instruction, row.expected, row.fields)
        under_way.remove(instruction)
        now += row.takes_s
        under_way += machine.handle(row.answer(now, instruction.step, **row.says))
    (last,) = under_way
    assert isinstance(last, Finish), f"{last} is not the end"
    return last.outcome


def answered(memory_mib: float = 0.0, reason: str = "", **more: Any) -> dict[str, Any]:
    """Fields of an application's answer."""
    return {"promised": ResourceVector(memory_mib=memory_mib), "reason": reason, **more}


def reported(memory_mib: float = 0.0, done: bool = True, reason: str = "") -> dict[str, Any]:
    """Fields of an application's report."""
    return {"relinquished": ResourceVector(memory_mib=memory_mib), "done": done, "reason": reason}


def measured(
    bound: Bound | None,
    online: tuple[int, ...] | None = (0,),
    unpluggable: tuple[int, ...] = (),
    spare_mib: float = 0.0,
    reason: str = "",
) -> dict[str, Any]:
    """Fields of a reading; ``online`` None: the guest said nothing."""
    guest = GuestReading(online, unpluggable, spare_mib) if online is not None else None
    return {"bound": bound, "guest": guest, "reason": reason}


def entry(outcome: Outcome, layer: Layer, resource: str) -> LedgerEntry:
    """One row of the ledger."""
    (found,) = [e for e in outcome.ledger if e.layer is layer and e.resource == resource]
    return found


__all__ = [
    "ZERO",
    "ApplicationAnswered",
    "ApplicationReported",
    "Measured",
    "Row",
    "Told",
    "answered",
    "check",
    "entry",
    "measured",
    "play",
    "reported",
]

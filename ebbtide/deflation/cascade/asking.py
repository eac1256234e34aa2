"""Rule for asking an application that has refused: it may say no, but not for ever.

"Ask, then force": after a refusal it is left alone for as long as it wished, within a limit; then it is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ebbtide.deflation.cascade.instructions import Mode

#: The longest time that is granted, in seconds.
LONGEST_RETRY_S: Final = 300.0
#: A refusal is forgotten so long after its time is up, in seconds: the next operation asks as if it were the first.
FORGOTTEN_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The latest refusal of a VM's application; an agent that restarts forgets it and asks again."""

    #: When it refused, in seconds of a clock that never goes back.
    at: float
    #: How long it wishes to be left alone; None if it did not say: then it refused this once ("nothing to give").
    retry_after_s: float | None = None
    #: How it was asked.
    mode: Mode = Mode.ASK

    @property
    def until(self) -> float:
        return self.at + min(self.retry_after_s or 0.0, LONGEST_RETRY_S)


def mode_of_asking(now: float, mode: Mode, refusal: Refusal | None) -> Mode | None:
    """How to ask the application now; None: not at all, the other layers do without it.

    :param mode: what the operation wishes. A forced one does not wait for an application that was only asked so far.
    """
    if refusal is None or refusal.retry_after_s is None or now >= refusal.until + FORGOTTEN_S:
        return mode
    if now >= refusal.until or (mode is Mode.FORCE and refusal.mode is Mode.ASK):
        return Mode.FORCE
    return None

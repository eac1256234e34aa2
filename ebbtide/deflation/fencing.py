"""Fence against late commands: those of a manager that leads no more, and those that a later one has overtaken.

A manager has one command at a time under way on a host and counts them. A network can hold one back until the manager
has given it up and sent others; carried out then, it would start a VM twice or take room that is never given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: By how much an epoch may rise at once. It counts the starts of managers: a host that was away for ten days of a start
#: each second still follows.
MOST_STEP: Final = 1_000_000
#: How far above its own a manager believes hosts that follow a higher epoch. Agents that follow nobody yet still follow
#: a manager that has raised its epoch by so much twenty times.
MOST_RAISE: Final = MOST_STEP // 20


@dataclass(frozen=True, slots=True)
class Fence:
    """The latest command of a manager that a host agent has seen."""

    epoch: int = 0
    order: int = 0

    def refusal(self, epoch: int, order: int) -> tuple[str, str]:
        """Why a command is refused, and the field that says so; empty where it is not.

        :param order: 0 for a command that is not counted (an operator's own): only its epoch is looked at.
        """
        if epoch - self.epoch > MOST_STEP:
            return f"epoch {epoch} is not plausible after {self.epoch}", "epoch"
        if epoch < self.epoch:
            return f"epoch {epoch} is over: the manager with epoch {self.epoch} leads", "epoch"
        if epoch == self.epoch and 0 < order < self.order:
            return f"order {order} was overtaken by command {self.order} of the same manager", "order"
        return "", ""

    def after(self, epoch: int, order: int = 0) -> Fence:
        """The fence once a command has been seen."""
        if epoch == self.epoch:
            return Fence(epoch, max(order, self.order))
        return self if epoch < self.epoch else Fence(epoch, order)


def outvoted(epoch: int, followed: Sequence[int]) -> int | None:
    """The epoch above a manager's own that more than half of the hosts follow, or a higher one; None: there is none.

    :param followed: of each host that answers, what it says. The figure is one that a host in its right mind stands
        behind as long as fewer than half of them lie.
    """
    if not followed:
        return None
    agreed = sorted(followed, reverse=True)[len(followed) // 2]
    return agreed if epoch < agreed <= epoch + MOST_RAISE else None

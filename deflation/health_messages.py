"""What a manager says of its own health, to anybody: nothing secret is in it."""

from __future__ import annotations

from typing import Literal

from deflation.messages import Body
from deflation.pages import Health

ManagerRole = Literal["leader", "standby"]


class ManagerHealth(Health):
    """The manager runs, and which role it has at this moment."""

    role: ManagerRole


class Readiness(Body):
    """The manager leads, and its store answers."""

    ready: Literal[True] = True
    epoch: int
    sentence: str

"""REST bodies of what the matcher says of machines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deflation.messages import Body, Name


class MachineRanking(Body):
    """How likely one machine keeps its cores for a task of a given duration (seed 000 Eq. 1)."""

    machine: Name
    host: str | None
    cores: int
    since_change_s: float | None = Field(None, description="time since the last core change; null if there was none")
    last_change: Literal["growth", "shrink"] | None = None
    duration_s: float
    completion_probability: float | None = Field(None, description="null without history: neither 0 nor 1")

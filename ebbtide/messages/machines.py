"""REST bodies of machines, as the matcher has them: core changes, the ranking by P_c, calibration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ebbtide.messages.common import LARGEST, Body, Name, Open, Page, Sentence


class CoreChange(Body):
    """One growth or shrink of a machine's cores (Agarwal et al. 2023, §2.1): one an operation and VM, at its end."""

    sequence: int = Field(ge=1, le=LARGEST, description="counts up on each host; the manager acknowledges by it")
    machine: Name
    host: Sentence = Field(description="where it was")
    at: float = Field(ge=0, le=1e11, description="seconds since the epoch")
    cores_before: float = Field(ge=0, le=1e6, description="verified")
    cores_after: float = Field(ge=0, le=1e6, description="verified")
    cause: Sentence = Field(description="of which operation, or why else")


class CoreChangePage(Page):
    """GET /v1/core-changes of the manager: newest first."""

    core_changes: tuple[CoreChange, ...] = Field(description="newest first")


class MachineRanking(Body):
    """How likely one machine keeps its cores for a task of a given duration (Agarwal et al. 2023, Eq. 1)."""

    machine: Name = Field(description="its name")
    host: str | None = Field(description="where it runs")
    cores: int = Field(description="usable now, whole")
    since_change_s: float | None = Field(None, description="time since the last core change; null if there was none")
    last_change: Open[Literal["growth", "shrink"]] | None = Field(
        None, description="its last core change; null: there was none"
    )
    duration_s: float = Field(description="of the task that was asked about, seconds")
    completion_probability: float | None = Field(None, description="null without history: neither 0 nor 1")


class MachinePage(Page):
    """GET /v1/machines of the manager: best first."""

    machines: tuple[MachineRanking, ...] = Field(description="best first")


class Decile(Body):
    """Predictions of one class: what was predicted on average, and what came true."""

    low: float = Field(description="predictions from here to below 0.1 more; the last class with 1")
    count: int = Field(description="predictions in this class")
    predicted: float = Field(description="on average")
    observed: float = Field(description="the share that came true")


class CalibrationCurve(Body):
    """Predictions held against outcomes."""

    count: int = Field(description="predictions whose outcome is known")
    brier: float | None = Field(None, description="mean squared error, 0 at best; null without outcomes")
    worst_error: float | None = Field(
        None, description="the largest difference in a decile with at least 200 predictions; null: there is none"
    )
    deciles: tuple[Decile, ...] = Field(description="those that have predictions, in ascending order")


class CalibrationReport(Body):
    """GET /v1/calibration: whether completion probabilities come true."""

    machines: CalibrationCurve = Field(
        description="for every machine that can lose cores, every 15 minutes, for 10 minutes and for an hour"
    )
    tasks: CalibrationCurve = Field(description="of restartable tasks, when each attempt was released")

"""Report of the demo: the document that `ebb demo -o json` prints."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from ebbtide.deflation.allocations import Priority
from ebbtide.lab.readings import Reading
from ebbtide.messages.common import Vector
from ebbtide.messages.machines import CoreChange, MachineRanking
from ebbtide.messages.operations import LedgerRow


class Report(BaseModel):
    """Base: the field names are those of the document."""

    model_config = ConfigDict(frozen=True)


class Readings(Report):
    """Independent readings of one VM: filled, deflated, and after reinflation and refill."""

    before: Reading
    deflated: Reading
    restored: Reading


class VMReport(Report):
    """One deflatable VM: its sizes as the manager had them, its ledger, and what was read apart from all agents."""

    name: str
    priority: Priority
    nominal: Vector
    deflated: Vector
    restored: Vector
    ledger: tuple[LedgerRow, ...]
    readings: Readings


class Check(Report):
    """One thing that the demo had to show. ``detail``: the figures, in one sentence."""

    name: str
    ok: bool
    detail: str


class DemoReport(Report):
    """The whole demo."""

    accelerator: str
    seconds: float
    vms: tuple[VMReport, ...]
    core_changes: tuple[CoreChange, ...]
    ranking: tuple[MachineRanking, ...]
    checks: tuple[Check, ...]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

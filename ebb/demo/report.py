"""What the demo found out: the document that `ebb demo --json` prints."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from deflation.allocations import Priority
from deflation.machine_messages import MachineRanking
from deflation.messages import CoreChange, LedgerRow, Vector
from ebb.readings import Reading


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


class Deflation(Report):
    """What one VM gave for another: its ledger, and its bound by readings that go through no agent."""

    vm: str
    cause: str
    ledger: tuple[LedgerRow, ...]
    before: Vector
    after: Vector


class ClusterReport(Report):
    """The script of arrivals and departures on two hosts."""

    accelerator: str
    seconds: float
    deflations: tuple[Deflation, ...]
    preemptions: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

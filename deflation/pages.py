"""REST bodies of lists: rows, and the cursor of the next page (parameter ``after``); null: there is none."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deflation.explanations import EventRow
from deflation.machine_messages import MachineRanking
from deflation.messages import Body, CoreChange, HostStatus, ManagedVM, Operation, VMStatus


class Health(Body):
    """The server runs."""

    status: Literal["ok"] = "ok"


class Page(Body):
    """Base of all pages."""

    next: str | None = Field(None, description="`after` of the next page; null: this is the last")


class HostPage(Page):
    """GET /v1/hosts of the manager: by id."""

    hosts: tuple[HostStatus, ...]


class VMPage(Page):
    """GET /v1/vms of the manager: by name."""

    vms: tuple[ManagedVM, ...]


class OperationPage(Page):
    """GET /v1/operations of the manager: newest first."""

    operations: tuple[Operation, ...]


class CoreChangePage(Page):
    """GET /v1/core-changes of the manager: newest first."""

    core_changes: tuple[CoreChange, ...]


class MachinePage(Page):
    """GET /v1/machines of the manager: best first."""

    machines: tuple[MachineRanking, ...]


class Event(EventRow):
    """One line of the manager's event log, with its number."""

    id: int = Field(ge=1, description="counts up; streams resume by it")


class EventPage(Page):
    """GET /v1/events of the manager: newest first."""

    events: tuple[Event, ...]


class VMStatusPage(Page):
    """GET /v1/vms of a host agent: by name."""

    vms: tuple[VMStatus, ...]

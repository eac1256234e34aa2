"""JSON schemas of what each command prints with `-o json`: docs/openapi/cli.json, by `make openapi`."""

from __future__ import annotations

from typing import Any, Final, NotRequired

from pydantic import TypeAdapter

# pydantic wants this one before Python 3.12.
from typing_extensions import TypedDict

from ebbtide.cli.findings import Finding
from ebbtide.cli.guest_channel import Enabled
from ebbtide.demo.report import DemoReport
from ebbtide.messages.commands import SteadyStatus
from ebbtide.messages.common import Vector
from ebbtide.messages.dry_runs import DryRunReport, Forecast, RebalancingReport
from ebbtide.messages.enrolment import Invitation, Revocation, Rollover, VoidedInvitations
from ebbtide.messages.explanations import Event, VMExplanation
from ebbtide.messages.history import HostHistory, VMHistory
from ebbtide.messages.hosts import (
    Caller,
    ForgottenHost,
    HostStatus,
    ManagerHealth,
    Readiness,
    TemplateInfo,
)
from ebbtide.messages.machines import CalibrationReport, CoreChange, MachineRanking
from ebbtide.messages.operations import Operation
from ebbtide.messages.tasks import AcquirerStatus, EngineStatus, ManagedTask, TaskExplanation, TaskOutput
from ebbtide.messages.vms import ClusterVM


class ContextRow(TypedDict):
    """A context, with the files that it names; manager and token_file are null for the lab of this machine."""

    name: str
    current: bool
    manager: str | None
    token_file: str | None
    ca: NotRequired[str]
    certificate: NotRequired[str]
    key: NotRequired[str]


class Applied(TypedDict):
    """What was to be done about a declared VM, the operation that did it (null: none was begun), and why it is not as
    declared (null: nothing is in the way)."""

    name: str
    action: str
    differences: list[str]
    operation: Operation | None
    error: str | None


class GoneVM(TypedDict):
    """What was waited for to be gone."""

    name: str
    state: str


class Mechanism(TypedDict):
    """A mechanism of a domain; fixes: texts to copy."""

    layer: str
    mechanism: str
    available: bool
    reason: str
    fixes: list[str]


class Conforms(TypedDict):
    """One check of a host agent; why: empty if it passed."""

    name: str
    ok: bool
    why: str


class Gives(TypedDict):
    """What a VM gives as such a guest."""

    guest_kind: str
    memory_mib: float | None
    cpu_cores_offline: int


class LabDaemon(TypedDict):
    """A daemon of the lab."""

    name: str
    pid: int | None
    running: bool
    log: str


class LabHost(TypedDict):
    """A host of the lab."""

    id: str
    state: str
    capacity: Vector
    vms: list[str]


def _object(name: str, **fields: Any) -> Any:
    return TypedDict(name, fields)  # type: ignore[operator]


_LAB: Final = _object(
    "Lab", state_dir=str, phase=str, accelerator=str, accelerator_reason=str, image=str | None, manager=str,
    token_file=str, daemons=list[LabDaemon], services_started=list[str], libvirtd=bool, hosts=list[LabHost],
)  # fmt: skip
_RESULTS: Final = _object("Results", directory=str, meta=dict[str, Any], cases=list[dict[str, Any]])
_FREE: Final = dict[str, Any]
#: The document of each command, by its words.
DOCUMENTS: Final[dict[str, Any]] = {
    "vm list": _object("VMs", vms=list[ClusterVM]),
    "vm show": ClusterVM,
    "vm create": Operation | DryRunReport,
    "vm label": ClusterVM,
    "vm delete": Operation | DryRunReport,
    "vm start": Operation,
    "vm stop": Operation,
    "vm shrink": Operation | Forecast,
    "vm grow": Operation | Forecast,
    "vm target": Operation | Forecast,
    "vm resize": Operation,
    "vm migrate": Operation,
    "vm explain": VMExplanation,
    "vm history": VMHistory,
    "vm doctor": _object(
        "VMDiagnosis", domain=str, running=bool, guest_kind=str, gives=list[Gives], mechanisms=list[Mechanism]
    ),
    "vm adopt": Operation,
    "vm release": Operation,
    "host list": _object("Hosts", hosts=list[HostStatus]),
    "host show": HostStatus,
    "host history": HostHistory,
    "host label": HostStatus,
    "host invite": Invitation,
    "host uninvite": VoidedInvitations,
    "host pause": Operation,
    "host resume": Operation,
    "host drain": Operation,
    "host config": SteadyStatus,
    "host undeflate": Operation,
    "host forget": ForgottenHost,
    "host revoke": Revocation,
    "host templates": _object("Templates", templates=list[TemplateInfo]),
    "host epoch": _object("Epoch", epoch=int, before=int),
    "host tokens": _object("HostTokens", host=str, command=str, report=str),
    "task submit": ManagedTask,
    "task list": _object("Tasks", tasks=list[ManagedTask]),
    "task show": ManagedTask,
    "task output": TaskOutput,
    "task explain": TaskExplanation,
    "task cancel": ManagedTask,
    "task engine": EngineStatus,
    "task acquirer": AcquirerStatus,
    "machine list": _object("Machines", machines=list[MachineRanking]),
    "machine show": MachineRanking,
    "machine changes": _object("CoreChanges", core_changes=list[CoreChange]),
    "machine calibration": CalibrationReport,
    "plan list": _object("Operations", operations=list[Operation]),
    "plan show": Operation,
    "plan cancel": Operation,
    "plan rebalance": RebalancingReport,
    "event list": _object("Events", events=list[Event]),
    "top": _object("Picture", hosts=list[HostStatus], vms=list[ClusterVM], events=list[Event]),
    "apply": _object("AppliedVMs", vms=list[Applied]),
    "wait vm": ClusterVM | GoneVM,
    "wait host": HostStatus | GoneVM,
    "wait task": ManagedTask,
    "context add": ContextRow,
    "context list": _object("Contexts", contexts=list[ContextRow]),
    "context show": ContextRow,
    "context use": ContextRow,
    "context remove": _object("Removed", removed=str, contexts=list[str]),
    "health": ManagerHealth | Readiness,
    "whoami": Caller,
    "doctor": _object("Diagnosis", ok=bool, findings=list[Finding]),
    "conformance": _object("Conformance", url=str, checks=list[Conforms]),
    "demo": DemoReport,
    "backup": _object("Backup", file=str, bytes=int),
    "openapi": _FREE,
    "certificates": _object("Certificates", ca=str, certificates=list[str]),
    "ca next": _object("NextCA", ca=str, next_ca_key=str),
    "ca show": Rollover,
    "ca finish": _object("FinishedCA", ca=str, certificates=list[str]),
    "token new": _object("Token", token=str, entry=dict[str, str]),
    "config check": list[_object("Checked", file=str, user=str, errors=list[str])],  # type: ignore[misc]
    "config example": _FREE,
    "guest enable": Enabled,
    "lab up": _LAB,
    "lab status": _LAB,
    "lab down": _object("Down", removed=bool),
    "lab image build": _object("Image", key=str, base=str, kernel=str, initrd=str, built_s=float),
    "sim inputs": _object("Trace", report=dict[str, Any], summary=dict[str, Any]),
    "sim run": _RESULTS,
    "sim show": _RESULTS,
    "sim compare": _object(
        "Comparison", baseline=str, others=list[str], differences=list[dict[str, Any]], notes=list[str]
    ),
}


def schema_of(words: str) -> dict[str, Any]:
    """The schema of one command's document; a later version may say more than it names."""
    found: dict[str, Any] = _open(TypeAdapter(DOCUMENTS[words]).json_schema(mode="serialization"))
    return found


def document() -> dict[str, Any]:
    """All of them, with the definitions that they share."""
    inputs = [(words, "serialization", TypeAdapter(kind)) for words, kind in DOCUMENTS.items()]
    schemas, shared = TypeAdapter.json_schemas(inputs)  # type: ignore[arg-type]
    commands = {words: schema for (words, _), schema in schemas.items()}
    title = "What each command prints with -o json"
    found: dict[str, Any] = _open({"title": title, "commands": commands, **shared})
    return found


def _open(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _open(value) for key, value in schema.items() if (key, value) != ("additionalProperties", False)}
    return [_open(value) for value in schema] if isinstance(schema, list) else schema

"""Commands about VMs: list, create, delete, bring to a size."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from pydantic import ValidationError

from ebbtide.cli.commands.options import DeadlineS, Interrupted, Json, Manager, OperationFailed, TokenFile, VMName, ask
from ebbtide.cli.output import Steps, print_json, print_table, shown, size
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.cascade.instructions import GuestKind, Mode
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.errors import EbbError
from ebbtide.messages.common import Vector, problem_of
from ebbtide.messages.dry_runs import DryRunReport, Forecast
from ebbtide.messages.operations import LedgerRow, Operation, OperationState
from ebbtide.messages.vms import NOTICE_S, ClusterVM, OnPreemption, VMSpec

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

Starter: TypeAlias = "Callable[[ManagerClient], Awaitable[Operation]]"
Cores = Annotated[float, typer.Option(help="Nominal CPU in cores.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and change nothing.")]
Version = Annotated[str | None, typer.Option(help="Only if the VM still has this version (`ebb vm NAME --json`).")]
MemoryMib = Annotated[float, typer.Option(help="Nominal memory in MiB.")]


class Start(StrEnum):
    """At what size a VM starts."""

    NOMINAL = "nominal"
    DEFLATED = "deflated"


def vms(
    host: Annotated[str | None, typer.Option(help="Only VMs of this host.")] = None,
    state: Annotated[str | None, typer.Option(help="Only VMs in this state: running, failed, ...")] = None,
    priority: Annotated[Priority | None, typer.Option(help="Only VMs of this priority.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Only VMs whose names begin so.")] = None,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """List the VMs with their sizes."""
    wanted: dict[str, Any] = {"host": host, "state": state, "priority": priority, "prefix": prefix}
    found = ask(manager, token_file, lambda client: client.vms(**wanted))
    if json:
        print_json({"vms": found})
    else:
        print_vms(found)


def vm(name: VMName, manager: Manager = None, token_file: TokenFile = None, json: Json = False) -> None:
    """Show one VM; its version is in --json."""
    found = ask(manager, token_file, lambda client: client.vm(name))
    if json:
        print_json(found)
    else:
        print_vms([found])


def print_vms(found: Sequence[ClusterVM]) -> None:
    """VMs as a table."""
    print_table(
        ("name", "host", "state", "priority", "nominal", "current", "minimum", "guest", "what happened last"),
        (
            (
                vm.name,
                vm.host or "-",
                _state(vm),
                vm.priority.value,
                size(vm.nominal),
                size(vm.current),
                size(vm.minimum),
                "connected" if vm.guest_connected else "-" if vm.guest_kind is GuestKind.AGENT else vm.guest_kind.value,
                vm.sentence,
            )
            for vm in found
        ),
        "there are no VMs",
    )


def _state(vm: ClusterVM) -> str:
    state = vm.state if vm.saved_mib is None else f"{vm.state} (suspended)"
    return state if vm.preempted is None else f"{state}, {vm.preempted.sentence}"


def create(
    name: VMName,
    cpu_cores: Cores,
    memory_mib: MemoryMib,
    disk_mib_s: Annotated[float, typer.Option(help="Nominal disk bandwidth in MiB/s; 0: not declared.")] = 0.0,
    network_mib_s: Annotated[float, typer.Option(help="Nominal network bandwidth in MiB/s; 0: not declared.")] = 0.0,
    priority: Annotated[Priority, typer.Option(help="fixed VMs are never deflated.")] = Priority.DEFLATABLE,
    minimum_cpu_cores: Annotated[float, typer.Option(help="Below this it is preempted instead.")] = 0.0,
    minimum_memory_mib: Annotated[float, typer.Option(help="Below this it is preempted instead.")] = 0.0,
    minimum_share: Annotated[float | None, typer.Option(help="The minimum as a share of nominal, instead.")] = None,
    start: Annotated[
        Start, typer.Option(help="deflated: smaller, where the nominal size fits nowhere.")
    ] = Start.NOMINAL,
    ceiling_cpu_cores: Annotated[float | None, typer.Option(help="Harvest VMs: up to where it grows.")] = None,
    ceiling_memory_mib: Annotated[float | None, typer.Option(help="Harvest VMs: up to where it grows.")] = None,
    boot_memory_mib: Annotated[float | None, typer.Option(help="Memory that cannot be unplugged.")] = None,
    on_preemption: Annotated[
        OnPreemption,
        typer.Option(help="stop: it keeps its disk and waits for room; suspend: its memory, too; delete: it goes."),
    ] = OnPreemption.STOP,
    preemption_notice_s: Annotated[float, typer.Option(help="Seconds to end its work when preempted.")] = NOTICE_S,
    template: Annotated[str, typer.Option(help="The template on the host.")] = "lab",
    policy: Annotated[PlacementPolicy | None, typer.Option(help="Default: the manager's.")] = None,
    deadline_s: DeadlineS = 60.0,
    dry_run: DryRun = False,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Place and start a VM; others are deflated for it where that is needed."""
    ceiling = None
    if ceiling_cpu_cores is not None or ceiling_memory_mib is not None:
        ceiling = {
            "cpu_cores": cpu_cores if ceiling_cpu_cores is None else ceiling_cpu_cores,
            "memory_mib": memory_mib if ceiling_memory_mib is None else ceiling_memory_mib,
            "disk_mib_s": disk_mib_s,
            "network_mib_s": network_mib_s,
        }
    body = {
        "name": name,
        "priority": priority,
        "nominal": {
            "cpu_cores": cpu_cores,
            "memory_mib": memory_mib,
            "disk_mib_s": disk_mib_s,
            "network_mib_s": network_mib_s,
        },
        "minimum": {"cpu_cores": minimum_cpu_cores, "memory_mib": minimum_memory_mib},
        "minimum_share": minimum_share,
        "start": start.value,
        "ceiling": ceiling,
        "boot_memory_mib": boot_memory_mib,
        "on_preemption": on_preemption,
        "preemption_notice_s": preemption_notice_s,
        "template": template,
    }
    try:
        spec = VMSpec.model_validate(body)
    except (ValidationError, InvalidField) as error:
        raise EbbError(problem_of(error).detail) from error
    if dry_run:
        report = ask(
            manager,
            token_file,
            lambda client: client.dry_run_creation(spec, policy=policy, deadline_s=deadline_s),
        )
        print_json(report) if json else print_dry_run(report)
        return
    carry_out(
        manager,
        token_file,
        json,
        lambda client: client.create(spec, policy=policy, deadline_s=deadline_s),
        f"placing {name}",
        undo=f"ebb delete {name}",
    )


def delete(
    name: VMName,
    version: Version = None,
    dry_run: DryRun = False,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Stop a VM and remove it; its host's deflated VMs grow into the room.

    A VM that is still being placed is called off: what was taken for it is given back.
    """
    if dry_run:
        report = ask(manager, token_file, lambda client: client.dry_run_deletion(name))
        print_json(report) if json else print_dry_run(report)
        return
    carry_out(manager, token_file, json, lambda client: client.delete(name, version=version), f"deleting {name}")


def print_dry_run(report: DryRunReport) -> None:
    """A dry run: the sentence, the hosts in their order, who would change."""
    print(shown(report.sentence))
    if report.hosts:
        rows = ((host.id, f"{host.fitness:.4f}", size(host.free), size(host.deflatable)) for host in report.hosts)
        print_table(("host", "fitness", "free", "deflatable"), rows, "")
    changes = [*report.deflated, *report.grown]
    if changes:
        print_table(("vm", "now", "then"), ((c.name, size(c.before), size(c.after)) for c in changes), "")
    if report.preempted:
        print(f"would preempt {', '.join(report.preempted)} (reason {report.reason})")


def target(
    name: VMName,
    cpu_cores: Annotated[float | None, typer.Option(help="CPU to reach, in cores; default: as now.")] = None,
    memory_mib: Annotated[float | None, typer.Option(help="Memory to reach, in MiB; default: as now.")] = None,
    disk_mib_s: Annotated[float | None, typer.Option(help="Disk bandwidth to reach; default: as now.")] = None,
    network_mib_s: Annotated[float | None, typer.Option(help="Network bandwidth to reach; default: as now.")] = None,
    mode: Annotated[Mode, typer.Option(help="ask: the application may refuse.")] = Mode.ASK,
    deadline_s: DeadlineS = 60.0,
    version: Version = None,
    dry_run: DryRun = False,
    manager: Manager = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Bring a VM to a size within its minimum and its nominal size (harvest VMs: their ceiling)."""
    given = {
        "cpu_cores": cpu_cores,
        "memory_mib": memory_mib,
        "disk_mib_s": disk_mib_s,
        "network_mib_s": network_mib_s,
    }
    wanted = {component: value for component, value in given.items() if value is not None}
    if not wanted:
        raise typer.BadParameter("name at least one component to change", param_hint="--cpu-cores, --memory-mib, ...")

    async def wish(client: ManagerClient) -> tuple[Vector, int]:
        vm = await client.vm(name)
        try:
            return Vector.model_validate(vm.current.model_dump() | wanted), vm.generation + 1
        except ValidationError as error:
            raise EbbError(f"target.{problem_of(error).detail}") from error

    async def start(client: ManagerClient) -> Operation:
        size_to_reach, generation = await wish(client)
        limits: dict[str, Any] = {"deadline_s": deadline_s, "mode": mode, "version": version}
        return await client.set_target(name, size_to_reach, generation=generation, **limits)

    async def foretell(client: ManagerClient) -> Forecast:
        size_to_reach, generation = await wish(client)
        return await client.forecast(name, size_to_reach, generation=generation, deadline_s=deadline_s, mode=mode)

    if dry_run:
        forecast = ask(manager, token_file, foretell)
        print_json(forecast) if json else print_forecast(forecast)
        return
    carry_out(manager, token_file, json, start, f"bringing {name} to its target")


def print_forecast(forecast: Forecast) -> None:
    """A dry run: the sentence, then what each layer could do."""
    print(shown(f"dry run, nothing is changed: {forecast.sentence}"))
    print_table(
        ("vm", "layer", "resource", "asked", "could", "reason"),
        (
            (vm.name, row.layer.value, row.resource, f"{row.asked:g}", f"{row.could:g}", row.reason)
            for vm in forecast.vms
            for row in vm.rows
        ),
        "no VM would be moved",
    )


def print_ledger(operation: Operation) -> None:
    """The ledger of every VM that an operation moved, as a table."""
    print_table(
        ("vm", "layer", "resource", "asked", "promised", "verified", "seconds", "reason"),
        (
            (vm.name, row.layer.value, row.resource, *amounts(row), row.reason)
            for vm in operation.vms
            for row in vm.ledger
        ),
        "no VM was moved",
    )


def amounts(row: LedgerRow) -> tuple[str, str, str, str]:
    """The figures of a ledger row as they stand in a table."""
    return f"{row.asked:g}", f"{row.promised:g}", f"{row.verified:g}", f"{row.seconds:.1f}"


def carry_out(
    manager: Manager,
    token_file: TokenFile,
    json: bool,
    start: Starter,
    what: str,
    *,
    host: str | None = None,
    undo: str = "",
) -> None:
    """Start an operation, follow it to its end and print it. Raises OperationFailed if it did not do all.

    :param host: whose operation it is, where it is not the manager's own.
    :param undo: the command that calls it off, where there is one.
    """
    begun: Operation | None = None

    async def conversation(client: ManagerClient) -> Operation:
        nonlocal begun
        with Steps(quiet=json) as steps:
            steps(what)
            begun = await start(client)
            # It has a deadline of its own, which may be an hour.
            return await client.wait(begun, limit_s=None, progress=steps, host=host)

    try:
        operation = ask(manager, token_file, conversation)
    except KeyboardInterrupt:
        raise Interrupted(_goes_on(begun, host, undo)) from None
    failed = operation.state is not OperationState.DONE
    if json:
        print_json(operation)
    else:
        if not failed:
            print(shown(operation.sentence))
        if operation.vms:
            print_ledger(operation)
    if failed:
        raise OperationFailed(f"the operation ended {operation.state.value}: {operation.sentence}")


def _goes_on(begun: Operation | None, host: str | None, undo: str) -> str:
    """What a user who stops waiting must know."""
    if begun is None:
        return "interrupted; the manager may have taken it on: `ebb operations` shows what it does"
    of_host = f" --host {host}" if host is not None else ""
    end = f"; to call it off: `{undo}`" if undo else ""
    return f"interrupted; the operation goes on: `ebb operation {begun.request_id}{of_host}` shows it{end}"

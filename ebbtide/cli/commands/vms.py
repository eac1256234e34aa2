"""Commands about VMs: list, show, create, delete; and how an operation is followed to its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from pydantic import ValidationError

from ebbtide.cli.commands import completion
from ebbtide.cli.commands.options import (
    Asking,
    DeadlineS,
    Interrupted,
    LabelChanges,
    Listing,
    OperationFailed,
    SelectorText,
    Showing,
    VMName,
    WrongCall,
    Yes,
    asked_again,
    confirm,
    is_away,
    label_changes,
    label_words,
)
from ebbtide.cli.declared import specs_of
from ebbtide.cli.output import Steps, Table, print_table, shown, size
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.cascade.instructions import GuestKind
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ZERO, figure
from ebbtide.errors import EbbError
from ebbtide.messages.common import problem_of
from ebbtide.messages.dry_runs import DryRunReport, Forecast
from ebbtide.messages.labels import changes_of
from ebbtide.messages.operations import LedgerRow, Operation, OperationState
from ebbtide.messages.vms import NOTICE_S, ClusterVM, OnPreemption, VMSpec

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

#: With the id of the request, which is the same however often it is asked for.
Starter: TypeAlias = "Callable[[ManagerClient, str], Awaitable[Operation]]"
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and change nothing.")]
Version = Annotated[
    str | None, typer.Option(help="Only if the VM still has this version (`ebb vm show NAME -o json`).")
]
File = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="YAML or JSON; - for standard input.")]
#: What goes with -f.
_WITH_FILE = {"name", "file", "policy", "deadline_s", "dry_run", "output", "manager", "token_file", "ca"}


class Start(StrEnum):
    """At what size a VM starts."""

    NOMINAL = "nominal"
    DEFLATED = "deflated"


def vms(
    host: Annotated[str | None, typer.Option(help="Only VMs of this host.", autocompletion=completion.hosts)] = None,
    state: Annotated[str | None, typer.Option(help="Only VMs in this state: running, failed, ...")] = None,
    priority: Annotated[Priority | None, typer.Option(help="Only VMs of this priority.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Only VMs whose names begin so.")] = None,
    selector: SelectorText = None,
    *,
    to: Listing,
) -> None:
    """List the VMs with their sizes."""
    wanted: dict[str, Any] = {
        "host": host,
        "state": state,
        "priority": priority,
        "prefix": prefix,
        "selector": selector,
    }
    to.list("vms", lambda client: client.vms(**wanted), VMS, wanted.values())


def _state(vm: ClusterVM) -> str:
    state = vm.state if vm.saved_mib is None else f"{vm.state} (suspended)"
    return state if vm.preempted is None else f"{state}, {vm.preempted.sentence}"


def _last(vm: ClusterVM) -> str:
    """What happened to it, after what it lacks of its nominal size by now."""
    lacks = vm.nominal.vector().less(vm.current.vector()) if vm.state == "running" else ZERO
    return vm.sentence if lacks.is_zero() else f"lacks {lacks} now; {vm.sentence}"


def _guest(vm: ClusterVM) -> str:
    return "connected" if vm.guest_connected else "-" if vm.guest_kind is GuestKind.AGENT else vm.guest_kind.value


VMS: Table[ClusterVM] = Table(
    {
        "name": lambda vm: vm.name,
        "host": lambda vm: vm.host or "-",
        "state": _state,
        "priority": lambda vm: vm.priority,
        "nominal": lambda vm: size(vm.nominal),
        "current": lambda vm: size(vm.current),
        "minimum": lambda vm: size(vm.minimum),
        "guest": _guest,
        "what happened last": _last,
    },
    {
        "ceiling": lambda vm: "-" if vm.ceiling is None else size(vm.ceiling),
        "on preemption": lambda vm: f"{vm.on_preemption}, {vm.preemption_notice_s:g} s",
        "steady": lambda vm: "yes" if vm.steady else "no",
        "generation": lambda vm: vm.generation,
        "version": lambda vm: vm.version or "-",
        "labels": lambda vm: label_words(vm.labels),
    },
    "there are no VMs",
)


def create(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The VM's name; with -f it is in the file.")
    ] = None,
    cpu_cores: Annotated[float | None, typer.Option(help="Nominal CPU in cores.")] = None,
    memory_mib: Annotated[float | None, typer.Option(help="Nominal memory in MiB.")] = None,
    file: File = None,
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
    steady: Annotated[bool, typer.Option(help="Whether steady mode may trim it, where its host has that on.")] = True,
    template: Annotated[str, typer.Option(help="The template on the host.")] = "lab",
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="May be given several times.")
    ] = None,
    policy: Annotated[PlacementPolicy | None, typer.Option(help="Default: the manager's.")] = None,
    deadline_s: DeadlineS = 60.0,
    dry_run: DryRun = False,
    *,
    context: typer.Context,
    to: Asking,
) -> None:
    """Place and start a VM; others are deflated for it where that is needed.

    With -f it is read of a file, with the fields of the body of POST /v1/vms.
    """
    if file is not None:
        given = [
            p.opts[0] for p in context.command.params if p.name not in _WITH_FILE and _is_given(context, str(p.name))
        ]
        if given:
            raise typer.BadParameter("says it already", param_hint=f"{', '.join(given)}: -f")
        specs = specs_of(file)
        if len(specs) != 1 or name not in (None, specs[0].name):
            raise WrongCall(f"{file} must hold one VM{f', {name},' if name else ''} and holds {len(specs)}: "
                            f"{', '.join(spec.name for spec in specs)}; `ebb apply` takes several")  # fmt: skip
        spec = specs[0]
    elif name is None or cpu_cores is None or memory_mib is None:
        raise typer.BadParameter("are needed where there is no -f", param_hint="NAME, --cpu-cores and --memory-mib")
    else:
        bandwidths = {"disk_mib_s": disk_mib_s, "network_mib_s": network_mib_s}
        ceiling = None
        if ceiling_cpu_cores is not None or ceiling_memory_mib is not None:
            ceiling = {
                "cpu_cores": cpu_cores if ceiling_cpu_cores is None else ceiling_cpu_cores,
                "memory_mib": memory_mib if ceiling_memory_mib is None else ceiling_memory_mib,
                **bandwidths,
            }
        body: dict[str, Any] = {
            "name": name,
            "priority": priority,
            "nominal": {"cpu_cores": cpu_cores, "memory_mib": memory_mib, **bandwidths},
            "minimum": {"cpu_cores": minimum_cpu_cores, "memory_mib": minimum_memory_mib},
            "minimum_share": minimum_share,
            "start": start.value,
            "ceiling": ceiling,
            "boot_memory_mib": boot_memory_mib,
            "on_preemption": on_preemption,
            "preemption_notice_s": preemption_notice_s,
            "steady": steady,
            "template": template,
        }
        try:
            body["labels"] = changes_of(label or [], "--label")
            spec = VMSpec.model_validate(body)
        except (ValidationError, InvalidField) as error:
            raise EbbError(problem_of(error).detail) from error
    if dry_run:
        report = to.ask(lambda client: client.dry_run_creation(spec, policy=policy, deadline_s=deadline_s))
        _say_dry_run(to, report)
        return
    carry_out(
        to,
        lambda client, once: client.create(spec, policy=policy, deadline_s=deadline_s, request_id=once),
        f"placing {spec.name}",
        undo=f"ebb vm delete {spec.name} --yes",
    )


def _is_given(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def label(name: VMName, labels: LabelChanges, version: Version = None, *, to: Showing) -> None:
    """Set labels of a VM, or take them away; its other labels stay."""
    changes = label_changes(labels)
    found = to.ask(lambda client: client.label_vm(name, changes, version=version))
    to.say(found, lambda: print(f"{name}: {label_words(found.labels)}"))


def delete(name: VMName, version: Version = None, dry_run: DryRun = False, yes: Yes = False, *, to: Asking) -> None:
    """Stop a VM and remove it; its host's deflated VMs grow into the room.

    A VM that is still being placed is called off: what was taken for it is given back.
    """
    if dry_run:
        report = to.ask(lambda client: client.dry_run_deletion(name))
        _say_dry_run(to, report)
        return
    confirm(f"delete {name} with its disk", yes)
    carry_out(to, lambda client, once: client.delete(name, version=version, request_id=once), f"deleting {name}")


def _say_dry_run(to: Asking, report: DryRunReport) -> None:
    """Print it. Raises OperationFailed where it would not be done."""
    to.say(report, lambda: _print_dry_run(report))
    if report.would == "failed":
        raise OperationFailed(report.sentence)


def _print_dry_run(report: DryRunReport) -> None:
    """The sentence, unless it is an error's, the hosts in their order, who would change."""
    if report.would != "failed":
        print(shown(report.sentence))
    if report.hosts:
        rows = ((host.id, f"{host.fitness:.4f}", size(host.free), size(host.deflatable)) for host in report.hosts)
        print_table(("host", "fitness", "free", "deflatable"), rows, "")
    changes = [*report.deflated, *report.grown]
    if changes:
        print_table(("vm", "now", "then"), ((c.name, size(c.before), size(c.after)) for c in changes), "")
    if report.preempted:
        print(f"would preempt {', '.join(report.preempted)} (reason {report.reason})")


def print_forecast(forecast: Forecast) -> None:
    """A dry run: the sentence, then what each layer could do."""
    print(shown(f"dry run, nothing is changed: {forecast.sentence}"))
    print_table(
        ("vm", "layer", "resource", "asked", "could", "reason"),
        (
            (vm.name, row.layer.value, row.resource, figure(row.asked), figure(row.could), row.reason)
            for vm in forecast.vms
            for row in vm.rows
        ),
        "no VM would be moved",
    )


def print_ledger(operation: Operation) -> None:
    """The ledger of every VM that an operation moved, as a table; nothing where it moved none."""
    if not any(vm.ledger for vm in operation.vms):
        return
    print_table(
        ("vm", "layer", "resource", "asked", "promised", "verified", "seconds", "reason"),
        ditto(
            (vm.name, row.layer.value, row.resource, *amounts(row), row.reason)
            for vm in operation.vms
            for row in vm.ledger
        ),
        "",
    )


def ditto(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows whose last column says a sentence once, and ``"`` where the row above has said it."""
    before = ""
    for *cells, reason in rows:
        yield (*cells, '"' if reason and reason == before else reason)
        before = reason


def amounts(row: LedgerRow) -> tuple[str, str, str, str]:
    """The figures of a ledger row as they stand in a table."""
    return figure(row.asked), figure(row.promised), figure(row.verified), f"{row.seconds:.1f}"


def carry_out(to: Asking, start: Starter, what: str, *, host: str | None = None, undo: str = "") -> None:
    """Start an operation, follow it to its end and print it. Raises OperationFailed if it did not do all.

    :param host: whose operation it is, where it is not the manager's own.
    :param undo: the command that calls it off, where there is one.
    """
    operation = followed(to, start, what, host=host, undo=undo)
    to.say(operation, lambda: _print_operation(operation))
    check(operation)


def followed(
    to: Asking, start: Starter, what: str, *, host: str | None = None, undo: str = "", again_s: float | None = None
) -> Operation:
    """Start an operation and follow it to its end, whatever that is.

    :param again_s: how long it is asked for again of a manager that is away; None: only where an answer was lost.
    """
    from ebbtide.client import ManagerUnreachable, new_request_id
    from ebbtide.client.errors import passes
    from ebbtide.client.manager import AWAY_S

    begun: Operation | None = None
    # An answer may be lost: asked again, it is the same request.
    request_id, lost = new_request_id(), False

    async def begin(client: ManagerClient) -> Operation:
        nonlocal lost
        try:
            return await start(client, request_id)
        except ManagerUnreachable as error:
            lost = lost or error.was_sent
            raise

    async def conversation(client: ManagerClient) -> Operation:
        nonlocal begun
        with Steps(quiet=to.for_programs) as steps:
            steps(what)
            for_s = AWAY_S if again_s is None else again_s
            begun = await asked_again(steps, begin, client, for_s=for_s, only_lost=again_s is None)
            # It has a deadline of its own, which may be an hour.
            return await client.wait(begun, limit_s=None, progress=steps, host=host)

    try:
        return to.ask(conversation)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {_goes_on(request_id, begun, host, undo)}") from None
    except EbbError as error:
        # The host's silence ends a wait, or what was passed on to it; else the manager has taken on nothing.
        away = is_away if begun is None and host is None else passes
        cause = error if away(error) else error.__cause__
        if not away(cause) or (begun is None and not lost):
            raise
        raise EbbError(f"{error}; {_goes_on(request_id, begun, host, undo)}") from cause


def check(operation: Operation) -> None:
    """Raises OperationFailed if it did not do all."""
    if operation.state is not OperationState.DONE:
        raise OperationFailed(f"the operation ended {operation.state.value}: {operation.sentence}")


def _print_operation(operation: Operation) -> None:
    """Its outcome, unless that is an error's sentence, and its ledger."""
    if operation.state is OperationState.DONE:
        print(shown(operation.sentence))
    if operation.vms:
        print_ledger(operation)


def _goes_on(request_id: str, begun: Operation | None, host: str | None, undo: str) -> str:
    """What a user who stops waiting must know."""
    of_host = f" --host {host}" if host is not None else ""
    if begun is None:
        return f"the manager may have taken it on: `ebb plan show {request_id}{of_host}` shows it if so"
    end = f"; to call it off: `{undo}`" if undo else ""
    return f"the operation goes on: `ebb plan show {begun.request_id}{of_host}` shows it{end}"

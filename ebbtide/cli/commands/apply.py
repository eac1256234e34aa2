"""`ebb apply`: VMs as a file declares them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbtide.cli.commands.options import Asking, DeadlineS, Interrupted, OperationFailed
from ebbtide.cli.commands.vms import DryRun, Starter, check, followed
from ebbtide.cli.declared import Change, change_to, specs_of
from ebbtide.cli.output import print_table
from ebbtide.errors import EbbError
from ebbtide.messages.operations import Operation
from ebbtide.messages.vms import ClusterVM, VMSpec

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

#: What a change is called in a table.
_WORDS = {"create": "to create", "resize": "to change", "label": "to label", "none": "as declared"}


def apply(
    file: Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="YAML or JSON; - for standard input.")],
    deadline_s: DeadlineS = 60.0,
    dry_run: DryRun = False,
    *,
    to: Asking,
) -> None:
    """Make VMs what a file declares: what is missing is created, what differs is changed, the differences are shown.

    A document of the file is a VM, in the form of the body of POST /v1/vms. VMs that it does not name are left alone. A
    VM that is there keeps its template and the memory that it boots with.
    """
    specs = specs_of(file)

    async def compare(client: ManagerClient) -> list[Change]:
        there = {vm.name: vm for vm in await client.vms()}
        return [change_to(spec, there.get(spec.name)) for spec in specs]

    changes = to.ask(compare)
    if not to.for_programs:
        _print(changes)
    operations: dict[str, Operation] = {}
    failures: list[str] = []
    for spec, change in zip(specs, changes, strict=True):
        if dry_run or change.action == "none":
            continue
        try:
            if change.labels:
                to.ask(_labelled(change))
            if not change.fields and change.fields is not None:
                continue
            done = operations[spec.name] = followed(
                to, _starter(spec, change, deadline_s), f"{change.action} {spec.name}"
            )
            check(done)
        except Interrupted:
            raise
        except EbbError as error:
            # The others are not made to wait for this one.
            failures.append(f"{spec.name}: {error}")
    if to.for_programs:
        to.say({"vms": [_row(change, operations.get(change.name)) for change in changes]}, list)
    elif not dry_run:
        for name, operation in operations.items():
            print(f"{name}: {operation.sentence}")
    if failures:
        raise OperationFailed(f"{len(failures)} of {len(specs)} VMs are not as declared: {'; '.join(failures)}")


def _labelled(change: Change) -> Callable[[ManagerClient], Awaitable[ClusterVM]]:
    async def label(client: ManagerClient) -> ClusterVM:
        return await client.label_vm(change.name, change.labels)

    return label


def _starter(spec: VMSpec, change: Change, deadline_s: float) -> Starter:
    async def start(client: ManagerClient) -> Operation:
        if change.fields is None:
            return await client.create(spec, deadline_s=deadline_s)
        return await client.resize(spec.name, **change.fields, deadline_s=deadline_s)

    return start


def _print(changes: Sequence[Change]) -> None:
    print_table(
        ("vm", "", "differences"),
        ((change.name, _WORDS[change.action], "; ".join(change.sentences) or "-") for change in changes),
        "",
    )


def _row(change: Change, operation: Operation | None) -> dict[str, Any]:
    return {
        "name": change.name,
        "action": change.action,
        "differences": list(change.sentences),
        "operation": operation,
    }

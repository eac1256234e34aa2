"""`ebb apply`: VMs as a file declares them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbtide.cli.commands.options import Asking, DeadlineS, Interrupted, OperationFailed, asked_again, is_away
from ebbtide.cli.commands.vms import DryRun, Starter, check, followed
from ebbtide.cli.declared import Change, change_to, specs_of
from ebbtide.cli.output import Steps, print_table
from ebbtide.errors import EbbError
from ebbtide.messages.operations import Operation
from ebbtide.messages.vms import VMSpec

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient

#: What a change is called in a table.
_WORDS = {"create": "to create", "resize": "to change", "label": "to label", "none": "as declared"}

#: By its owner, the rebalancer, or what was done for one that stands before it in the file.
_CHANGED = "it has changed since the differences were shown: apply again"


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
    from ebbtide.client import ManagerRefused
    from ebbtide.client.manager import AWAY_S

    specs = specs_of(file)

    async def compare(client: ManagerClient) -> list[Change]:
        there = {vm.name: vm for vm in await client.vms()}
        return [change_to(spec, there.get(spec.name)) for spec in specs]

    changes = to.ask(compare)
    if not to.for_programs:
        _print(changes)
    operations: dict[str, Operation] = {}
    failures: dict[str, str] = {}
    again_s = AWAY_S
    for spec, change in zip(specs, changes, strict=True):
        if change.hindrance:
            failures[spec.name] = change.hindrance
        if dry_run or change.action == "none":
            continue
        try:
            if change.labels:
                change = to.ask(_labelled(to, spec, change, again_s))
            if not change.fields and change.fields is not None:
                continue
            begin = _starter(spec, change, deadline_s)
            done = operations[spec.name] = followed(to, begin, f"{change.action} {spec.name}", again_s=again_s)
            again_s = AWAY_S
            check(done)
        except Interrupted:
            raise
        except EbbError as error:
            # The others are not made to wait for this one.
            by_now_another = isinstance(error, ManagerRefused) and error.status == 412
            failures[spec.name] = _CHANGED if by_now_another else str(error)
            if is_away(error) or is_away(error.__cause__):
                # A manager that was waited for in vain is not waited for once more for each VM.
                again_s = 0.0
    if to.for_programs:
        to.say({"vms": [_row(change, operations, failures) for change in changes]}, list)
    elif not dry_run:
        for name, operation in operations.items():
            print(f"{name}: {operation.sentence}")
    if failures:
        each = "; ".join(f"{name}: {why}" for name, why in failures.items())
        how = "would not be" if dry_run else "are not"
        raise OperationFailed(f"{len(failures)} of {len(specs)} VMs {how} as declared: {each}")


def _labelled(to: Asking, spec: VMSpec, change: Change, again_s: float) -> Callable[[ManagerClient], Awaitable[Change]]:
    """Set the labels; what is left to be done then."""
    from ebbtide.client import ManagerRefused, ManagerUnreachable

    lost = False

    async def label(client: ManagerClient) -> Change:
        nonlocal lost
        try:
            labelled = await client.label_vm(change.name, change.labels, version=change.version)
        except ManagerUnreachable as error:
            lost = lost or error.may_be_done
            raise
        except ManagerRefused as error:
            if not lost or error.status != 412:
                raise
            # It was done, unless somebody else did it: nothing is done then but what was shown.
            left = change_to(spec, await client.vm(change.name))
            if left.hindrance or left.labels or not set(left.sentences) <= set(change.sentences):
                raise
            return left
        return replace(change, version=labelled.version)

    async def ask(client: ManagerClient) -> Change:
        with Steps(quiet=to.for_programs) as steps:
            return await asked_again(steps, label, client, for_s=again_s)

    return ask


def _starter(spec: VMSpec, change: Change, deadline_s: float) -> Starter:
    async def start(client: ManagerClient, request_id: str) -> Operation:
        once: dict[str, Any] = {"deadline_s": deadline_s, "request_id": request_id}
        if change.fields is None:
            return await client.create(spec, **once)
        return await client.resize(spec.name, **change.fields, version=change.version, **once)

    return start


def _print(changes: Sequence[Change]) -> None:
    print_table(
        ("vm", "", "differences"),
        ((change.name, _word(change), "; ".join(change.sentences) or _why(change)) for change in changes),
        "",
    )


def _word(change: Change) -> str:
    return "not as declared" if change.hindrance else _WORDS[change.action]


def _why(change: Change) -> str:
    return change.hindrance or change.under_way or "-"


def _row(change: Change, operations: Mapping[str, Operation], failures: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": change.name,
        "action": change.action,
        "differences": list(change.sentences),
        "operation": operations.get(change.name),
        "error": failures.get(change.name) or change.hindrance or None,
    }

"""`ebb doctor`: this machine, or the ACPI probe; `ebb vm doctor`: a VM; `ebb conformance`: a host agent of others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli import conformance as contract
from ebbtide.cli.commands.options import Printing
from ebbtide.cli.doctor import examine
from ebbtide.cli.doctor_vm import VMDiagnosis, examine_vm
from ebbtide.cli.doctor_vm import probe_acpi as probe_acpi_unplug
from ebbtide.cli.managers import check_protected
from ebbtide.cli.output import Steps, print_table
from ebbtide.deflation.cascade.instructions import GuestKind
from ebbtide.errors import EbbError

VM = Annotated[str, typer.Argument(metavar="VM", help="A VM, or any domain of libvirt on this machine.")]
Uri = Annotated[str, typer.Option("--uri", help="libvirt of this machine.")]
ProbeAcpi = Annotated[
    bool,
    typer.Option("--probe-acpi", help="Let a throw-away guest try vCPU unplug; agents go by the outcome. Needs root."),
]

Url = Annotated[str, typer.Argument(metavar="URL", help="Where the agent listens, such as http://127.0.0.1:7101.")]
AgentToken = Annotated[Path, typer.Option("--token-file", help="File with the token that managers send to the agent.")]
Epoch = Annotated[int, typer.Option(min=1, help="The leadership to play: managers below it are refused from then on.")]
Template = Annotated[str, typer.Option(help="What the VM of the test is made of.")]

KINDS = {
    GuestKind.AGENT: "the domain has a channel for Ebbtide's guest agent",
    GuestKind.QEMU_GUEST_AGENT: "qemu-guest-agent answers, and nothing of Ebbtide's",
    GuestKind.BALLOON: "nothing answers but a balloon driver",
}


def doctor(probe_acpi: ProbeAcpi = False, uri: Uri = "qemu:///system", *, to: Printing) -> None:
    """Look at what this machine has and what is missing, with what puts it right; `ebb vm doctor` looks at a VM."""
    if probe_acpi:
        with Steps(quiet=to.for_programs) as steps:
            verdict = probe_acpi_unplug(uri, steps)
        can = "vCPUs can be unplugged" if verdict.passed else "vCPUs are not unplugged"
        to.say({"passed": verdict.passed, "reason": verdict.reason}, lambda: print(f"{can}: {verdict.reason}"))
        return
    with Steps(quiet=to.for_programs) as steps:
        diagnosis = examine(steps)
    rows = (
        (
            "ok" if found.ok else "ENDED" if found.ended else "MISSING" if found.needed else "note",
            found.name,
            found.detail,
            found.fix or "",
        )
        for found in diagnosis.findings
    )
    to.say(
        diagnosis.as_dict(),
        lambda: print_table(("", "what", "found", "to put it right"), rows, "nothing was looked at"),
    )
    if diagnosis.problem:
        raise EbbError(diagnosis.problem)


def doctor_vm(vm: VM, uri: Uri = "qemu:///system", *, to: Printing) -> None:
    """Look at which layers a VM has, or any domain of libvirt on this machine, and what opens the others."""
    diagnosis = examine_vm(vm, uri)
    to.say(diagnosis.as_dict(), lambda: _print_vm(diagnosis))


def _print_vm(diagnosis: VMDiagnosis) -> None:
    print(f"{diagnosis.domain}, {'running' if diagnosis.running else 'not running'}")
    print_table(
        ("layer", "mechanism", "", "why"),
        (
            (found.layer.value, found.mechanism.value, "available" if found.available else "BLOCKED", found.reason)
            for found in diagnosis.findings
        ),
        "nothing was looked at",
    )
    print(f"\nguest: {diagnosis.kind.value}, {KINDS[diagnosis.kind]}")
    if diagnosis.gifts:
        print_table(
            ("as", "memory now", "cores off line", ""),
            (
                (
                    gift.kind.value,
                    "not known" if gift.memory_mib is None else f"{gift.memory_mib:.0f} MiB",
                    str(gift.cpus),
                    words,
                )
                for gift, words in diagnosis.steps_up()
            ),
            "nothing was looked at",
        )
    fixes = diagnosis.fixes()
    if fixes:
        print("\nTo put it right; XML counts from the VM's next start:")
    for text, mechanisms in fixes.items():
        print(f"\n[{', '.join(mechanisms)}]\n{text}")


def conformance(
    url: Url, token_file: AgentToken, epoch: Epoch = 1, template: Template = "lab", *, to: Printing
) -> None:
    """Test a host agent against the contract: makes, shrinks, stops and deletes one small VM. Exit code 1: it fails."""
    check_protected(url)
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EbbError(
            f"cannot read the token file {token_file}: {getattr(error, 'strerror', None) or error}"
        ) from error
    with Steps(quiet=to.for_programs) as steps:
        checks = asyncio.run(contract.examine(url, token, epoch, template, steps))
    rows = (("ok" if c.ok else "FAILS", c.name, c.why) for c in checks)
    to.say(
        {"url": url, "checks": [{"name": c.name, "ok": c.ok, "why": c.why} for c in checks]},
        lambda: print_table(("", "check", "why"), rows, "nothing was checked"),
    )
    if not all(check.ok for check in checks):
        raise typer.Exit(1)

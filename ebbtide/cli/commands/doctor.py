"""`ebb doctor`: this machine, one VM, or the ACPI probe."""

from __future__ import annotations

from typing import Annotated

import typer

from ebbtide.cli.commands.options import Json
from ebbtide.cli.doctor import examine
from ebbtide.cli.doctor_vm import VMDiagnosis, examine_vm, probe_acpi
from ebbtide.cli.output import Steps, print_json, print_table
from ebbtide.deflation.cascade.instructions import GuestKind
from ebbtide.errors import EbbError

VM = Annotated[
    str | None,
    typer.Argument(metavar="VM", help="A VM, or any domain of libvirt: which layers it has. Default: this machine."),
]
Uri = Annotated[str, typer.Option("--uri", help="libvirt of this machine.")]
ProbeAcpi = Annotated[
    bool,
    typer.Option("--probe-acpi", help="Let a throw-away guest try vCPU unplug; agents go by the outcome. Needs root."),
]

KINDS = {
    GuestKind.AGENT: "the domain has a channel for Ebbtide's guest agent",
    GuestKind.QEMU_GUEST_AGENT: "qemu-guest-agent answers, and nothing of Ebbtide's",
    GuestKind.BALLOON: "nothing answers but a balloon driver",
}


def doctor(vm: VM = None, probe_acpi: ProbeAcpi = False, uri: Uri = "qemu:///system", json: Json = False) -> None:
    """Look at what this machine or a VM has and what is missing, with what puts it right."""
    if vm is not None and probe_acpi:
        raise typer.BadParameter("looks at this machine, so it takes no VM", param_hint="--probe-acpi")
    if probe_acpi:
        _probe_acpi(uri, json)
    elif vm is not None:
        diagnosis = examine_vm(vm, uri)
        if json:
            print_json(diagnosis.as_dict())
        else:
            _print_vm(diagnosis)
    else:
        _machine(json)


def _machine(json: bool) -> None:
    with Steps(quiet=json) as steps:
        diagnosis = examine(steps)
    if json:
        print_json(diagnosis.as_dict())
    else:
        print_table(
            ("", "what", "found", "to put it right"),
            (
                ("ok" if found.ok else "MISSING" if found.needed else "note", found.name, found.detail, found.fix or "")
                for found in diagnosis.findings
            ),
            "nothing was looked at",
        )
    if not diagnosis.ok:
        missing = [found.name for found in diagnosis.findings if found.needed and not found.ok]
        raise EbbError(f"{', '.join(missing)} missing; `scripts/install-deps.sh` installs all of it on Debian")


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


def _probe_acpi(uri: str, json: bool) -> None:
    with Steps(quiet=json) as steps:
        verdict = probe_acpi(uri, steps)
    if json:
        print_json({"passed": verdict.passed, "reason": verdict.reason})
    else:
        print(f"{'vCPUs can be unplugged' if verdict.passed else 'vCPUs are not unplugged'}: {verdict.reason}")

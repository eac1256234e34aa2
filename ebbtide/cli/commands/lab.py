"""`ebb lab ...` and `ebb demo`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Annotated, Any

import typer

from ebbtide.cli import contexts
from ebbtide.cli.commands.cluster import MACHINES
from ebbtide.cli.commands.options import Printing
from ebbtide.cli.commands.vms import amounts
from ebbtide.cli.output import Steps, print_table, size
from ebbtide.client import ManagerClient
from ebbtide.demo.errors import DemoFailed
from ebbtide.demo.report import DemoReport
from ebbtide.demo.scenario import Demo
from ebbtide.errors import EbbError
from ebbtide.lab import paths
from ebbtide.lab.cluster import DEFAULT_HOSTS, HostSlice, Lab
from ebbtide.lab.image import build_image
from ebbtide.lab.state import LabState

_DEFAULTS = ", ".join(
    f"{host.id}=cpu_cores={host.capacity.cpu_cores:g},memory_mib={host.capacity.memory_mib:g}" for host in DEFAULT_HOSTS
)
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", metavar="ID=cpu_cores=N,memory_mib=N", help=f"A host's slice; repeat it. [{_DEFAULTS}]"),
]


def image_build(*, to: Printing) -> None:
    """Build the guest image, or say where it is cached."""
    with Steps() as steps:
        image = build_image(paths.image_cache(), progress=lambda stage, done: steps(f"{done:4.0%} {stage}"))
    made = {"key": image.key, "base": str(image.base), "kernel": str(image.kernel), "initrd": str(image.initrd)}
    how = f"was built in {image.built_s:.1f} s" if image.built_s else "was cached"
    to.say({**made, "built_s": round(image.built_s, 1)}, lambda: print(f"{image.base} {how}"))


def up(
    host: Hosts = None,
    own_libvirt: Annotated[
        bool, typer.Option("--own-libvirt", help="A libvirtd of its own for each host, as live migration needs it.")
    ] = False,
    *,
    to: Printing,
) -> None:
    """Start a manager and host agents on this machine; an up lab is left as it is."""
    _need_root("the lab")
    slices = [HostSlice.parse(text) for text in host] if host else None
    with Steps() as steps:
        lab = Lab(report=steps)
        state = lab.up(slices, own_libvirt)
    names = ", ".join(f"{host.id} ({size(host.capacity)})" for host in state.hosts)
    sentence = f"the lab is up: {names}; manager at {state.manager_url}, logs in {lab.logs}"
    to.say(lab.status() if to.for_programs else None, lambda: print(sentence))
    with contextlib.suppress(EbbError):
        if (used := contexts.read().current) != contexts.LAB:
            print(f"note: the context {used} is used; `ebb context use lab` makes it the lab", file=sys.stderr)


def down(*, to: Printing) -> None:
    """Stop the lab and remove all that it made, but the image cache; also after a crash."""
    with Steps() as steps:
        removed = Lab(report=steps).down()
    to.say({"removed": removed}, lambda: print("the lab is down" if removed else "no lab was up"))


def status(*, to: Printing) -> None:
    """Show what of the lab runs."""
    found = Lab().status()
    to.say(found, lambda: _print_status(found))


def _print_status(found: dict[str, Any]) -> None:
    print(f"phase {found['phase']}, {found['accelerator']}: {found['accelerator_reason']}")
    print(f"manager {found['manager']}, token in {found['token_file']}")
    print("libvirtd answers" if found["libvirtd"] else "libvirtd does not answer: `ebb lab up` starts it again")
    print_table(
        ("daemon", "pid", "runs", "log"),
        ((row["name"], row["pid"] or "-", "yes" if row["running"] else "no", row["log"]) for row in found["daemons"]),
        "no daemons",
    )
    print_table(
        ("host", "state", "vms"),
        ((row["id"], row["state"], " ".join(row["vms"]) or "-") for row in found["hosts"]),
        "no hosts",
    )


def demo(
    lab: Annotated[bool, typer.Option("--lab", help="Bring a lab up before and down afterwards.")] = False,
    *,
    to: Printing,
) -> None:
    """Deflate two VMs with filled caches for a third one, and give it all back."""
    with Steps() as steps:
        home = Lab(report=steps)
        if lab:
            _need_root("the lab")
            if home.file.load() is not None:
                raise EbbError("a lab is up already; run `ebb demo` without --lab, or `ebb lab down` first")
            try:
                home.up()
                report = _run_demo(home.state(), steps)
            finally:
                home.down()
        else:
            report = _run_demo(home.state(), steps)
    to.say(report, lambda: _print_report(report))
    if report.failed:
        names = "; ".join(f"{check.name}: {check.detail}" for check in report.failed)
        raise DemoFailed(f"{len(report.failed)} of {len(report.checks)} checks failed: {names}")


def _run_demo(state: LabState, steps: Steps) -> DemoReport:
    """The demo in an event loop of its own; SIGTERM ends it as Ctrl-C does, with its VMs removed."""

    async def run() -> DemoReport:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with ManagerClient(state.manager_url, state.manager_token_file.read_text().strip()) as client:
            return await Demo(client, state, steps).run()

    try:
        return asyncio.run(run())
    except asyncio.CancelledError as error:
        raise DemoFailed("the demo was called off") from error


def _print_report(report: DemoReport) -> None:
    print(f"{report.accelerator}, {report.seconds:.0f} s")
    print_table(
        ("vm", "nominal", "deflated", "restored"),
        ((vm.name, size(vm.nominal), size(vm.deflated), size(vm.restored)) for vm in report.vms),
        "no VM was moved",
    )
    print()
    print_table(
        ("vm", "layer", "resource", "asked", "promised", "verified", "seconds", "reason"),
        ((vm.name, row.layer.value, row.resource, *amounts(row), row.reason) for vm in report.vms for row in vm.ledger),
        "the ledger is empty",
    )
    print()
    MACHINES.print(report.ranking)
    print()
    print_table(
        ("", "check", "figures"),
        (("ok" if check.ok else "FAILED", check.name, check.detail) for check in report.checks),
        "nothing was checked",
    )


def _need_root(what: str) -> None:
    if os.geteuid() != 0:
        raise EbbError(f"{what} needs root: libvirt's system instance, the guest image; run it through sudo")

"""Commands about the lifecycle of VMs: stop, start, resize, migrate, adopt, release; moves on trial; templates."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from ebbtide.cli.commands import completion
from ebbtide.cli.commands.options import Asking, DeadlineS, HostName, Listing, VMName, Yes, confirm, seconds
from ebbtide.cli.commands.vms import DryRun, carry_out
from ebbtide.cli.output import Steps, Table, print_table, shown, size
from ebbtide.deflation.allocations import Priority
from ebbtide.errors import EbbError
from ebbtide.messages.adoptions import MEASURED_S, Adoptable
from ebbtide.messages.common import PartialVector, Vector, problem_of
from ebbtide.messages.dry_runs import RebalancingReport
from ebbtide.messages.hosts import TemplateInfo
from ebbtide.messages.vms import OnPreemption

LimitS = Annotated[float, seconds("For the guest's own power-off, then by force.", 3600)]
LoseDisk = Annotated[bool, typer.Option("--lose-disk", help="What is on a disk that is not shared may be lost.")]
_KEPT = "What it keeps in any case; default: by what it uses now."
Component = Annotated[float | None, typer.Option(help="Default: as it is.")]


def stop(name: VMName, limit_s: LimitS = 60.0, *, to: Asking) -> None:
    """Have a VM power off; it keeps its name, its host and its disk, and its room goes to the others."""
    carry_out(to, lambda client, once: client.stop(name, limit_s=limit_s, request_id=once), f"stopping {name}")


def start(
    name: VMName,
    anywhere: Annotated[bool, typer.Option("--anywhere", help="Elsewhere, where its host has no room.")] = False,
    lose_disk: LoseDisk = False,
    deadline_s: DeadlineS = 60.0,
    *,
    to: Asking,
) -> None:
    """Start a VM that is off; others are deflated for it where that is needed."""
    carry_out(
        to,
        lambda client, once: client.start(
            name, anywhere=anywhere, lose_disk=lose_disk, deadline_s=deadline_s, request_id=once
        ),
        f"starting {name}",
    )


def resize(
    name: VMName,
    cpu_cores: Component = None,
    memory_mib: Component = None,
    disk_mib_s: Component = None,
    network_mib_s: Component = None,
    minimum_cpu_cores: Component = None,
    minimum_memory_mib: Component = None,
    ceiling_cpu_cores: Component = None,
    ceiling_memory_mib: Component = None,
    priority: Annotated[Priority | None, typer.Option(help="Default: as it is.")] = None,
    on_preemption: Annotated[OnPreemption | None, typer.Option(help="stop, suspend, delete; default: as is.")] = None,
    preemption_notice_s: Annotated[float | None, typer.Option(help="Seconds to end its work when preempted.")] = None,
    steady: Annotated[bool | None, typer.Option(help="Whether steady mode may trim it.")] = None,
    deadline_s: DeadlineS = 60.0,
    *,
    to: Asking,
) -> None:
    """Change what a VM is sold as; what its running domain cannot take comes with its next start."""
    nominal = _partial(
        "nominal", cpu_cores=cpu_cores, memory_mib=memory_mib, disk_mib_s=disk_mib_s, network_mib_s=network_mib_s
    )
    minimum = _partial("minimum", cpu_cores=minimum_cpu_cores, memory_mib=minimum_memory_mib)
    ceiling = _partial("ceiling", cpu_cores=ceiling_cpu_cores, memory_mib=ceiling_memory_mib)
    if all(part is None for part in (nominal, minimum, ceiling, priority, on_preemption, preemption_notice_s, steady)):
        raise typer.BadParameter("name at least one thing to change", param_hint="--cpu-cores, --priority, ...")
    carry_out(
        to,
        lambda client, once: client.resize(
            name,
            nominal=nominal,
            minimum=minimum,
            ceiling=ceiling,
            priority=priority,
            on_preemption=on_preemption,
            preemption_notice_s=preemption_notice_s,
            steady=steady,
            deadline_s=deadline_s,
            request_id=once,
        ),
        f"resizing {name}",
    )


def migrate(
    name: VMName,
    host: Annotated[
        str | None, typer.Option(help="Where to; default: where it fits best.", autocompletion=completion.hosts)
    ] = None,
    lose_disk: LoseDisk = False,
    limit_s: LimitS = 60.0,
    deadline_s: DeadlineS = 60.0,
    live: Annotated[bool, typer.Option("--live", help="While it runs, at the size that it has.")] = False,
    copy_storage: Annotated[bool, typer.Option("--copy-storage", help="Live: copy a disk that is not shared.")] = False,
    bandwidth_mib_s: Annotated[float, typer.Option(min=0, help="Live: at most; 0: no limit.")] = 0.0,
    *,
    to: Asking,
) -> None:
    """Stop a VM and start it on another host, or move it --live; if that fails it stays where it was.

    It is off then if it was stopped. What does not move live within the deadline is called off.
    """
    carry_out(
        to,
        lambda client, once: client.migrate(
            name,
            host=host,
            lose_disk=lose_disk,
            limit_s=limit_s,
            deadline_s=deadline_s,
            live=live,
            copy_storage=copy_storage,
            bandwidth_mib_s=bandwidth_mib_s,
            request_id=once,
        ),
        f"moving {name}",
    )


def rebalance(
    dry_run: DryRun = False,
    lasted_s: Annotated[
        float | None,
        seconds(
            "VMs are taken to have been deflated for so long; default: as the manager has seen it, or 1800.", 86_400
        ),
    ] = None,
    *,
    to: Asking,
) -> None:
    """Say which VMs would be moved to hosts with room, why, at what cost and for what; with --dry-run only."""
    if not dry_run:
        raise EbbError(
            "no command moves many: `ebb plan rebalance --dry-run` says which moves are worth it, `ebb vm migrate NAME "
            "--live --host HOST` makes one, and `ebb-manager --rebalance` makes them by itself"
        )
    report = to.ask(lambda client: client.dry_run_rebalancing(lasted_s=lasted_s))
    to.say(report, lambda: _print_rebalancing(report))


def _print_rebalancing(report: RebalancingReport) -> None:
    print(shown(report.sentence))
    if report.moves:
        print_table(
            ("vm", "from", "to", "copied", "deflated for", "given back", "core-hours", "GiB-hours", "why"),
            (
                (
                    move.vm,
                    move.source,
                    move.target,
                    f"{move.memory_mib:g} MiB{' and its disk' if move.copies_disk else ''}",
                    f"{move.lasted_s:.0f} s",
                    size(move.given_back),
                    f"{move.core_hours:g}",
                    f"{move.gib_hours:g}",
                    move.sentence,
                )
                for move in report.moves
            ),
            "",
        )
    if report.more:
        print("there may be more: ask again after these")
    for row in report.left_out:
        print(shown(f"left out: {row.sentence}"))


def adopt(
    domain: Annotated[str, typer.Argument(metavar="NAME", help="The domain's name in libvirt.")],
    host: Annotated[str, typer.Option(help="The host that it runs on.", autocompletion=completion.hosts)],
    as_name: Annotated[str | None, typer.Option("--as", help="Its name from now on; default: the domain's.")] = None,
    minimum_cpu_cores: Annotated[float | None, typer.Option(help=_KEPT)] = None,
    minimum_memory_mib: Annotated[float | None, typer.Option(help=_KEPT)] = None,
    priority: Annotated[Priority, typer.Option(help="fixed or deflatable.")] = Priority.DEFLATABLE,
    yes: Yes = False,
    *,
    to: Asking,
) -> None:
    """Manage a running domain that was made without Ebbtide, at the size that it has.

    What it keeps in any case follows from what it uses now, where no minimum is given; `ebb vm resize` changes it.
    A VM of its host that the manager does not know, as after a restored backup, is recorded as it is there.
    """
    minimum = _partial("minimum", cpu_cores=minimum_cpu_cores, memory_mib=minimum_memory_mib) or PartialVector()
    kept = minimum.onto(Vector())
    if priority is not Priority.FIXED and None in (minimum.cpu_cores, minimum.memory_mib):
        with Steps(quiet=to.for_programs) as steps:
            steps(f"looking for {MEASURED_S:g} s at what {domain} uses")
            found = to.ask(lambda client: client.adoptable(domain, host))
        kept, question = minimums_by_use(found, minimum), f"adopt {domain} with this minimum"
        if found.known_as is not None:
            as_name, question = as_name or found.known_as, f"put {found.known_as} back on the record as it is"
        if not to.for_programs:
            print(shown(proposal(found, kept)))
        confirm(question, yes, instead="give --yes, or the minimums")
    carry_out(
        to,
        lambda client, once: client.adopt(domain, host, name=as_name, priority=priority, minimum=kept, request_id=once),
        f"adopting {domain}",
    )


def release(name: VMName, deadline_s: DeadlineS = 60.0, yes: Yes = False, *, to: Asking) -> None:
    """Give an adopted VM back: everything that was taken is undone, and it is managed no more."""
    confirm(f"release {name}, so that it is managed no more", yes)
    carry_out(
        to,
        lambda client, once: client.release(name, deadline_s=deadline_s, request_id=once),
        f"releasing {name}",
    )


def templates(host: HostName, *, to: Listing) -> None:
    """List the templates of a host."""
    to.list("templates", lambda client: client.templates(host), TEMPLATES)


TEMPLATES: Table[TemplateInfo] = Table(
    {
        "template": lambda row: row.name,
        "shared disk": lambda row: "yes" if row.shared_disk else "-",
        "largest size": lambda row: size(row.most) if row.most else "-",
        "description": lambda row: row.description,
    },
    {},
    "the host has no templates",
)


def minimums_by_use(found: Adoptable, given: PartialVector) -> Vector:
    """What a domain is to keep: as given, else by what it was seen to use.

    :raises EbbError: it cannot be adopted, or it is not known what it uses.
    """
    if found.why_not:
        raise EbbError(found.sentence)
    kept = given.onto(Vector(**found.minimum.model_dump(exclude_none=True)))
    for component, option in (("memory_mib", "--minimum-memory-mib"), ("cpu_cores", "--minimum-cpu-cores")):
        if getattr(given, component) is None and getattr(found.minimum, component) is None:
            raise EbbError(f"{found.sentence}: say by {option} what it keeps in any case")
    return kept


def proposal(found: Adoptable, kept: Vector) -> str:
    """What was measured, and what follows, in words."""
    if found.known_as is not None:
        return f"{found.sentence}: {size(found.size)}; it keeps {size(kept)} in any case"
    used = found.used
    cores = "cores not known" if used.cpu_cores is None else f"{used.cpu_cores:g} cores"
    memory = "memory not known" if used.memory_mib is None else f"{used.memory_mib:g} MiB"
    return (
        f"{found.domain} has {size(found.size)} and used {cores}, {memory} in {found.window_s:g} s; "
        f"it keeps {size(kept)} in any case"
    )


def _partial(what: str, **components: float | None) -> PartialVector | None:
    """The components that are given; None if there are none."""
    given = {component: value for component, value in components.items() if value is not None}
    try:
        return PartialVector.model_validate(given) if given else None
    except ValidationError as error:
        raise EbbError(f"{what}.{problem_of(error).detail}") from error

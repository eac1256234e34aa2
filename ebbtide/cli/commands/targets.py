"""Commands that bring a VM to a size: target, shrink, grow."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from ebbtide.cli.commands.options import Asking, DeadlineS, VMName
from ebbtide.cli.commands.vms import DryRun, Version, carry_out, print_forecast
from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.errors import EbbError
from ebbtide.messages.common import PartialVector, problem_of

if TYPE_CHECKING:
    from ebbtide.client import ManagerClient
    from ebbtide.messages.dry_runs import Forecast
    from ebbtide.messages.operations import Operation
    from ebbtide.messages.vms import ClusterVM

Cores = Annotated[float | None, typer.Option(help="CPU to reach, in cores.")]
MemoryMib = Annotated[float | None, typer.Option(help="Memory to reach, in MiB.")]
DiskMibS = Annotated[float | None, typer.Option(help="Disk bandwidth to reach, in MiB/s.")]
NetworkMibS = Annotated[float | None, typer.Option(help="Network bandwidth to reach, in MiB/s.")]
HowMuch = Annotated[Mode, typer.Option(help="ask: the application may refuse.")]


class Way(StrEnum):
    """Whether a size may only fall, or only rise."""

    EITHER = "target"
    SHRINK = "shrink"
    GROW = "grow"


def target(
    name: VMName,
    cpu_cores: Cores = None,
    memory_mib: MemoryMib = None,
    disk_mib_s: DiskMibS = None,
    network_mib_s: NetworkMibS = None,
    mode: HowMuch = Mode.ASK,
    deadline_s: DeadlineS = 60.0,
    version: Version = None,
    dry_run: DryRun = False,
    *,
    to: Asking,
) -> None:
    """Bring a VM to a size within its minimum and its nominal size (harvest VMs: their ceiling).

    What is not named stays as it is.
    """
    wanted = _named(cpu_cores, memory_mib, disk_mib_s, network_mib_s)
    _reach(to, name, wanted, Way.EITHER, mode, deadline_s, version, dry_run)


def shrink(
    name: VMName,
    cpu_cores: Cores = None,
    memory_mib: MemoryMib = None,
    disk_mib_s: DiskMibS = None,
    network_mib_s: NetworkMibS = None,
    mode: HowMuch = Mode.ASK,
    deadline_s: DeadlineS = 60.0,
    version: Version = None,
    dry_run: DryRun = False,
    *,
    to: Asking,
) -> None:
    """Deflate a VM to a size that is no larger than its own in anything, and not below its minimum.

    It stays at that size until it is told to grow.
    """
    wanted = _named(cpu_cores, memory_mib, disk_mib_s, network_mib_s)
    _reach(to, name, wanted, Way.SHRINK, mode, deadline_s, version, dry_run)


def grow(
    name: VMName,
    cpu_cores: Cores = None,
    memory_mib: MemoryMib = None,
    disk_mib_s: DiskMibS = None,
    network_mib_s: NetworkMibS = None,
    deadline_s: DeadlineS = 60.0,
    version: Version = None,
    dry_run: DryRun = False,
    *,
    to: Asking,
) -> None:
    """Reinflate a VM to a size that is no smaller than its own in anything; without one: to its nominal size."""
    given = (cpu_cores, memory_mib, disk_mib_s, network_mib_s)
    wanted = None if given == (None,) * 4 else _named(*given)
    _reach(to, name, wanted, Way.GROW, Mode.ASK, deadline_s, version, dry_run)


def _named(
    cpu_cores: float | None, memory_mib: float | None, disk_mib_s: float | None, network_mib_s: float | None
) -> dict[str, float]:
    given = {
        "cpu_cores": cpu_cores,
        "memory_mib": memory_mib,
        "disk_mib_s": disk_mib_s,
        "network_mib_s": network_mib_s,
    }
    wanted = {component: value for component, value in given.items() if value is not None}
    if not wanted:
        raise typer.BadParameter("name at least one component to change", param_hint="--cpu-cores, --memory-mib, ...")
    return wanted


def size_to_reach(vm: ClusterVM, wanted: dict[str, float] | None, way: Way) -> PartialVector:
    """The size that is asked of a VM; what is not named keeps its size, whatever that is by then.

    :param wanted: by component; None: nominal, or what it has where that is more.
    :raises EbbError: it is no size, or not the way that is to be gone; names the component.
    """
    now = vm.current.model_dump()
    if vm.state != "running":  # it has no size to compare with: the manager says what can be done
        way = Way.EITHER
    if wanted is None:
        wanted = {component: max(value, now[component]) for component, value in vm.nominal.model_dump().items()}
    for component, value in wanted.items():
        if (way is Way.SHRINK and value > now[component]) or (way is Way.GROW and value < now[component]):
            other = Way.GROW if way is Way.SHRINK else Way.SHRINK
            raise EbbError(
                f"target.{component}: {vm.name} has {now[component]:g}, so {value:g} is for `ebb vm {other} {vm.name}`"
            )
    try:
        return PartialVector.model_validate(wanted)
    except ValidationError as error:
        raise EbbError(f"target.{problem_of(error).detail}") from error


def _reach(
    to: Asking,
    name: str,
    wanted: dict[str, float] | None,
    way: Way,
    mode: Mode,
    deadline_s: float,
    version: str | None,
    dry_run: bool,
) -> None:
    found: ClusterVM | None = None

    async def start(client: ManagerClient, request_id: str) -> Operation:
        nonlocal found
        # Looked at once: asked again, it is the same request.
        found = vm = found or await client.vm(name)
        limits: dict[str, Any] = {"deadline_s": deadline_s, "mode": mode, "version": version, "request_id": request_id}
        return await client.set_target(name, size_to_reach(vm, wanted, way), generation=number(vm), **limits)

    async def foretell(client: ManagerClient) -> Forecast:
        vm = await client.vm(name)
        size = size_to_reach(vm, wanted, way)
        return await client.forecast(name, size, generation=number(vm), deadline_s=deadline_s, mode=mode)

    def number(vm: ClusterVM) -> int | None:
        # Up or down is told by the size that was looked at: the VM must not have another by then.
        return None if way is Way.EITHER else vm.generation + 1

    if dry_run:
        forecast = to.ask(foretell)
        to.say(forecast, lambda: print_forecast(forecast))
        return
    carry_out(to, start, f"bringing {name} to its target")

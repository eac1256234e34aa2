"""What the random runs over the agent are made of: VMs, moments, deadlines; and what it must not log."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.vm.host import Host
from hostagent.vm.managed_vm import ManagedVM
from tests.hostagent.local_world import ROUNDING, Domain, LocalWorld

STEPS_EACH: Final = 200
#: Examples of a run, and the steps that these make at least; the deep run is `make test-deep`.
RUN: Final = (40, 5_000)
DEEP_RUN: Final = (400, 66_000)

HOST: Final = "host-a"
CAPACITY: Final = ResourceVector(cpu_cores=8, memory_mib=4600, disk_mib_s=120, network_mib_s=120)
OVERHEAD_MIB: Final = 100.0
#: The longest that anything may take once nothing is wrong any more, in seconds.
PATIENCE_S: Final = 600.0
NAMES: Final = ("a", "b", "c", "d", "e")

shares = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
deadlines = st.sampled_from([0.0, 0.5, 5.0, 30.0, 60.0])
moments = st.sampled_from([0.0, 0.01, 0.1, 0.4, 2.5])
indices = st.integers(0, 4)


@st.composite
def specs(draw: st.DrawFn) -> VMSpec:
    nominal = Vector(
        cpu_cores=draw(st.sampled_from([1.0, 2.0, 2.5, 4.0])),
        memory_mib=draw(st.sampled_from([512.0, 1024.0, 1536.0])),
        disk_mib_s=draw(st.sampled_from([0.0, 40.0])),
        network_mib_s=draw(st.sampled_from([0.0, 40.0])),
    )
    share = draw(shares)
    priority = draw(st.sampled_from([*[Priority.DEFLATABLE] * 3, Priority.FIXED, Priority.HARVEST]))
    minimum = ResourceVector(*(round(value * share) for value in nominal.vector()))
    harvest = priority is Priority.HARVEST
    more = ResourceVector(draw(st.sampled_from([0.0, 1.0, 1.5])), 512)
    ceiling = Vector.of(nominal.vector() + more) if harvest else None
    return VMSpec(
        name=draw(st.sampled_from(NAMES)),
        priority=priority,
        nominal=nominal,
        minimum=Vector.of(minimum),
        ceiling=ceiling,
    )


class Count:
    """Steps over all examples, and the world whose guests are spoken to now."""

    steps = 0
    world: LocalWorld | None = None


async def connect(path: str, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To a guest of the present world."""
    assert Count.world is not None
    return await Count.world.connect(path, limit)


def between(low: ResourceVector, high: ResourceVector, share: float) -> Vector:
    """A size between two."""
    return Vector.of(ResourceVector(*(round(a + (b - a) * share, 2) for a, b in zip(low, high, strict=True))))


def assert_whole(vm: ManagedVM, domain: Domain, last: str) -> None:
    """The VM has all that it may have, in the world and on the books."""
    upper, held = vm.allocation().upper, domain.may_hold()
    assert upper.fits_in(held + ROUNDING), f"{vm.name} was left with {held} of {upper}: {last}"
    assert domain.held_mib >= upper.memory_mib - ROUNDING.memory_mib, f"{vm.name} holds {domain.held_mib}"
    # What was sold less while it ran may hold more in its guest: a limit stands at what it is sold.
    least_mib = min(domain.held_mib, upper.memory_mib) - ROUNDING.memory_mib
    assert domain.limit_mib is None or domain.limit_mib >= least_mib, f"{vm.name} is limited to {domain.limit_mib}"
    assert upper.fits_in(vm.allocation().current + ROUNDING), f"{vm.name} has {upper}, but not on the books"


def known(host: Host) -> set[str]:
    """The domains of the VMs that an agent knows."""
    return {vm.domain for vm in host.vms.values()}


async def ended(tasks: set[asyncio.Task[None]]) -> None:
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


#: What the agent logged as an error: all that it expects is a warning at most.
ERRORS: list[str] = []


def note_errors(logger: Any, method: str, event: Any) -> Any:
    if method in ("error", "exception", "critical") and len(ERRORS) < 3:
        ERRORS.append(str(structlog.processors.format_exc_info(logger, method, dict(event)))[-1500:])
    raise structlog.DropEvent


@contextmanager
def errors_noted() -> Iterator[None]:
    configured = structlog.get_config()
    structlog.configure(processors=[note_errors], wrapper_class=structlog.make_filtering_bound_logger(30))
    try:
        yield
    finally:
        structlog.configure(**configured)
        ERRORS.clear()


@contextmanager
def made_up() -> Iterator[None]:
    """Guests of the present world, no disk, and errors noted; what a run left of its loop is gone in the end."""
    with pytest.MonkeyPatch.context() as patch, errors_noted():
        patch.setattr(asyncio, "open_unix_connection", connect)
        patch.setattr(os, "fsync", lambda file: None)
        try:
            yield
        finally:
            asyncio.set_event_loop(None)


def phases() -> list[Phase]:
    """Of hypothesis: in CI nobody waits for a smaller example."""
    return [stage for stage in Phase if stage is not Phase.shrink or not os.environ.get("CI")]


def run_machine(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    with made_up():
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                phases=phases(),
                suppress_health_check=list(HealthCheck),
            ),
        )

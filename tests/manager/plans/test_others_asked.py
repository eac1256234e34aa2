"""A VM that gives less than it was asked for: the others on its host are asked before anyone is preempted."""

from __future__ import annotations

import pytest

from cluster_manager.plans.growth import MOST_BESIDE, MOST_GROWING, may_begin
from cluster_manager.plans.lifecycle import start_resize
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import Create, Event, Plan, Preempt, ReadHost, Reclaim, Reinflate, Respec, Start, Step
from cluster_manager.plans.returns import start_return
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState, VMOutcome
from ebbtide.messages.vms import VMState, VMStatus
from tests.manager.plan_events import chosen, ended, placement, read, spec_of, status_of

LOW_1 = spec_of("low-1", "deflatable", 3.0, 800.0)
LOW_2 = spec_of("low-2", "deflatable", 3.0, 800.0)
HIGH = spec_of("high-1", cpu_cores=2.0, memory_mib=1100.0)


def host(first: Vector, second: Vector, at: float = 0.0) -> Event:
    return read("a", status_of(LOW_1, "a", first), status_of(LOW_2, "a", second), at=at)


FULL = host(LOW_1.nominal, LOW_2.nominal)
#: low-1 has given half of what it should have.
LESS = host(Vector(cpu_cores=2.0, memory_mib=700.0), Vector(cpu_cores=2.0, memory_mib=650.0), at=5.0)
DONE = host(Vector(cpu_cores=2.0, memory_mib=700.0), Vector(cpu_cores=2.0, memory_mib=300.0), at=6.0)


def fell_short(name: str) -> Event:
    outcome = VMOutcome(
        name=name,
        generation=1,
        ledger=(),
        target=Vector(),
        before=Vector(),
        after=Vector(),
        shortfall=Vector(memory_mib=100.0),
        sentence="short",
        seconds=1.0,
    )
    return ended("reclaim", OperationState.PARTIAL, vms=(outcome,))


def after(*events: Event, preempting: bool = True) -> Step:
    state = placement(HIGH)
    for event in (*((chosen(),) if preempting else ()), chosen("a"), *events):
        step = state.next_step(event)
        assert isinstance(step.state, PlacementPlan)
        state = step.state
    return step


def test_what_one_did_not_give_the_others_are_asked_for() -> None:
    for preempting in (True, False):
        step = after(FULL, fell_short("low-1"), LESS, preempting=preempting)
        again = step.state.instruction
        assert isinstance(again, Reclaim)
        assert again.exclude == ("low-1",)
        assert again.need.memory_mib == 350.0, "1200 with its overhead, of which 850 are free"
        placed = after(FULL, fell_short("low-1"), LESS, ended("reclaim"), DONE, preempting=preempting)
        assert isinstance(placed.state.instruction, Create)


def test_where_the_others_do_not_have_it_a_vm_is_preempted() -> None:
    lacking = host(Vector(cpu_cores=2.0, memory_mib=750.0), Vector(cpu_cores=2.0, memory_mib=600.0), at=5.0)
    assert isinstance(after(FULL, fell_short("low-1"), lacking).state.instruction, Preempt)
    assert isinstance(after(FULL, fell_short("low-1"), lacking, preempting=False).state.instruction, Reinflate)


def test_nobody_is_asked_twice() -> None:
    assert isinstance(after(FULL, fell_short("low-1"), LESS, fell_short("low-2"), LESS).state.instruction, Preempt)


#: Two have all of 4096 MiB with their overheads, and one of them gives none of it.
HELD = spec_of("held", "deflatable", 2.0, 1948.0)
GIVES = spec_of("gives", "deflatable", 2.0, 1948.0)
NEW = spec_of("new", "deflatable", 2.0, 1948.0).model_copy(update={"start": "deflated", "boot_memory_mib": 384.0})


def crowded(gives_mib: float = 1948.0, *more: VMStatus, at: float = 0.0) -> Event:
    size = Vector(cpu_cores=2.0, memory_mib=gives_mib)
    vms = (status_of(HELD, "a"), status_of(GIVES, "a", size), *more)
    return read("a", *vms, at=at, cpu_cores=16.0, memory_mib=4096.0)


def stopped() -> VMStatus:
    gone = {"current": Vector(), "overhead_mib": 0.0, "start_size": NEW.nominal}
    return status_of(NEW, "a", state=VMState.STOPPED).model_copy(update=gone)


@pytest.mark.parametrize(
    ("plan", "there", "itself"),
    [
        (placement(NEW).having(purpose="deflated", instruction=ReadHost(host="a"), host="a"), (), ()),
        (start_return("return", NEW, "a"), (stopped(),), ("new",)),
    ],
    ids=["deflated", "return"],
)
def test_a_vm_that_may_start_smaller_has_the_others_asked_before_it_gives_up(
    plan: Plan, there: tuple[VMStatus, ...], itself: tuple[str, ...]
) -> None:
    state = plan
    for event in (crowded(1948.0, *there), fell_short("held"), crowded(1948.0, *there, at=5.0)):
        state = state.next_step(event).state
    again = state.instruction
    assert isinstance(again, Reclaim)
    assert again.exclude == (*itself, "held")
    assert again.need.memory_mib == 1024.0, "with its overhead: half of what the two have that share"
    given = state.next_step(ended("reclaim")).state.next_step(crowded(924.0, *there, at=6.0)).state.instruction
    assert isinstance(given, Create | Start)
    assert given.start_size == Vector(cpu_cores=2.0, memory_mib=924.0)
    # Neither gives: nobody is asked twice.
    state = state.next_step(fell_short("gives")).state.next_step(crowded(1948.0, *there, at=6.0)).state
    assert not isinstance(state.instruction, Reclaim | Create | Start)


def test_one_that_can_start_with_what_it_was_given_starts() -> None:
    state: Plan = start_return("return", NEW, "a")
    for event in (crowded(1948.0, stopped()), fell_short("held"), crowded(1400.0, stopped(), at=5.0)):
        state = state.next_step(event).state
    assert isinstance(state.instruction, Start)


@pytest.mark.parametrize("layer", [None, "guest"])
def test_a_resize_has_the_others_asked_and_not_the_vm_itself(layer: str | None) -> None:
    own = spec_of("own", "deflatable", 2.0, 1148.0)
    grown = own.model_copy(update={"nominal": Vector(cpu_cores=2.0, memory_mib=1648.0)})
    held, gives = (spec_of(name, "deflatable", 2.0, 1324.0) for name in ("held", "gives"))

    def full(gives_mib: float = 1324.0) -> Event:
        size = Vector(cpu_cores=2.0, memory_mib=gives_mib)
        vms = (status_of(held, "a"), status_of(gives, "a", size), status_of(own, "a"))
        return read("a", *vms, at=5.0, cpu_cores=16.0, memory_mib=4096.0)

    def short(name: str) -> Plan:
        return state.next_step(fell_short(name)).state.having(failed_layer=layer)

    state = start_resize("plan", "request", "a", grown, 60.0).next_step(full()).state
    assert isinstance(state.instruction, Reclaim)
    state = short("held").next_step(full()).state
    assert isinstance(state.instruction, Reclaim)
    assert (state.instruction.exclude, state.instruction.need.memory_mib) == (("own", "held"), 500.0)
    given = state.next_step(ended("reclaim")).state.next_step(full(824.0)).state
    assert isinstance(given.instruction, Respec)
    state = short("gives").next_step(full()).state
    assert not isinstance(state.instruction, Reclaim | Respec), "nobody is asked twice"


def test_what_the_vm_itself_has_is_not_counted_with_the_others() -> None:
    own = spec_of("own", "deflatable", 2.0, 1948.0)
    grown = own.model_copy(update={"nominal": Vector(cpu_cores=2.0, memory_mib=2448.0)})
    full = read("a", status_of(HELD, "a"), status_of(own, "a"), at=5.0, cpu_cores=16.0, memory_mib=4096.0)
    state = start_resize("plan", "request", "a", grown, 60.0).next_step(full).state
    state = state.next_step(fell_short("held")).state.next_step(full).state
    assert not isinstance(state.instruction, Reclaim | Respec)


def test_vms_grow_on_few_hosts_at_a_time_and_on_fewer_while_somebody_waits() -> None:
    assert may_begin(MOST_GROWING - 1, commanded=False)
    assert not may_begin(MOST_GROWING, commanded=False)
    assert may_begin(MOST_BESIDE - 1, commanded=True)
    assert not may_begin(MOST_BESIDE, commanded=True)

"""Room that comes on another host before anyone is preempted: it is taken, and nobody goes."""

from __future__ import annotations

from dataclasses import replace

from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import ChooseHosts, Create, Event, Note, Preempt, ReadHost, Reclaim, Reinflate, Step
from ebbtide.messages.common import Vector
from tests.manager.plan_events import chosen, ended, placement, read, spec_of, status_of

LOW = spec_of("low-1", "deflatable", 3.0, 1000.0)
HIGH = spec_of("high-1", cpu_cores=5.8)
#: Even at its minimum low-1 leaves too little of 6 cores.
FULL = read("a", status_of(LOW, "a"))
SHRUNK = read("a", status_of(LOW, "a", Vector(cpu_cores=0.5, memory_mib=300.0)), at=5.0)
EMPTY = read("b", at=6.0)


def after(*events: Event) -> Step:
    """A fixed VM that finds no host by deflation, and comes to a where preemption would do."""
    state = placement(HIGH)
    for event in (chosen(), chosen("a"), *events):
        step = state.next_step(event)
        assert isinstance(step.state, PlacementPlan)
        state = step.state
    return step


def test_a_host_that_has_room_by_now_is_taken_and_what_was_deflated_is_given_back() -> None:
    assert isinstance(after(FULL).state.instruction, Reclaim)
    reclaimed = (FULL, ended("reclaim", at=5.0))
    assert isinstance(after(*reclaimed, SHRUNK).state.instruction, Preempt), "without it low-1 has to go"
    step = after(*reclaimed, replace(SHRUNK, elsewhere="b"))
    assert isinstance(step.state.instruction, Reinflate)
    assert step.state.progress[-1] == "b has room by now: nobody is preempted on a"
    assert not any(isinstance(effect, Note) and effect.kind == "preempting" for effect in step.effects)
    given_back = (*reclaimed, replace(SHRUNK, elsewhere="b"), ended("reinflate", at=6.0))
    assert after(*given_back).state.instruction == ReadHost(host="b")
    create = after(*given_back, EMPTY).state.instruction
    assert isinstance(create, Create)
    assert create.host == "b"


def test_it_looks_again_once_only_and_within_the_same_time() -> None:
    events = (FULL, ended("reclaim", at=5.0), replace(SHRUNK, elsewhere="b"), ended("reinflate", at=6.0))
    taken = read("b", status_of(spec_of("high-2", cpu_cores=6.0), "b"), at=7.0)
    back = after(*events, taken)
    assert back.state.instruction == ChooseHosts(purpose="preempt")
    again = (*events, taken, chosen("a", at=7.0), replace(FULL, elapsed_s=7.0, elsewhere="b"))
    reclaim = after(*again).state.instruction
    assert isinstance(reclaim, Reclaim)
    # Since the first choice of a, of 60 s; half of what is left is kept for the notice.
    assert reclaim.deadline_s == 53.0
    preempting = after(*again, ended("reclaim", at=8.0), replace(SHRUNK, elapsed_s=8.0, elsewhere="b"))
    assert isinstance(preempting.state.instruction, Preempt)

"""A host whose agent has forgotten a start is not left before that start can no longer come: it may be doubled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import Event, Finish, Forgotten, HostFailed, HostRead
from ebbtide.deflation.modes import HostMode
from ebbtide.messages.operations import OperationState
from tests.manager.plan_events import chosen, ended, placement, read, spec_of, status_of
from tests.manager.plans.test_plans import FLOOR, HIGH, LOW_1, LOW_2, full, run, shrunk

LAPSE = Forgotten(0.0, lapse=True)


def draining(event: HostRead) -> HostRead:
    return replace(event, report=event.report.model_copy(update={"mode": HostMode.DRAINING}))


def taken(host: str) -> HostRead:
    """Another VM, of which nothing can be taken, is there now."""
    return read(host, status_of(spec_of("other", cpu_cores=5.0), host))


@pytest.mark.parametrize("lapse", [False, True])
@pytest.mark.parametrize("why", ["draining", "no-room", "unreachable"])
def test_a_host_that_forgot_the_start_is_left_once_the_vm_is_removed_there(why: str, lapse: bool) -> None:
    first: dict[str, tuple[Event, ...]] = {
        "draining": (draining(read("a")),),
        "no-room": (taken("a"),),
        "unreachable": (full("a"), HostFailed(0.0, "a is silent", uncertain=True)),
    }
    events = (chosen("a", "b"), read("a"), Forgotten(0.0, lapse=lapse), *first[why])
    said, state, _ = run(placement(HIGH), *events)
    assert said[-1] == "remove high-1 a"
    assert isinstance(state, PlacementPlan)
    assert "a: a" not in state.failures[-1]
    on, _, _ = run(state, ended("delete"), *([ended("reinflate")] if why == "unreachable" else []))
    assert on[-1] == "read-host b"
    lost, state, effects = run(state, HostFailed(0.0, "a is away", uncertain=True))
    assert lost[-1] == "finish"
    assert any(getattr(effect, "owed", None) and getattr(effect, "host", None) == "a" for effect in effects)


def test_what_was_taken_there_is_given_back_after_that() -> None:
    known = (chosen("a", "b"), full("a"), ended("reclaim"), shrunk("a"), LAPSE, draining(shrunk("a")))
    said, _, _ = run(placement(HIGH), *known, ended("delete"), ended("reinflate"))
    assert said[-3:] == ["remove high-1 a", "reinflate a", "read-host b"]


def test_a_host_that_has_fallen_short_is_remembered_so_though_the_start_is_removed_there_first() -> None:
    known = (chosen("a", "b"), full("a"), ended("reclaim"), shrunk("a"), LAPSE, taken("a"))
    said, state, _ = run(placement(HIGH), *known, ended("delete"), ended("reinflate"))
    assert said[-3:] == ["remove high-1 a", "reinflate a", "read-host b"]
    assert isinstance(state, PlacementPlan)
    assert state.short_on == ("a",)


def test_a_start_that_was_refused_at_once_is_no_reason_to_remove_anything() -> None:
    said, _, _ = run(placement(HIGH), chosen("a", "b"), read("a"), HostFailed(0.0, "409", uncertain=False))
    assert said[-1] == "read-host b"


def preempted() -> tuple[Event, ...]:
    """Up to the start that is forgotten, after low-2 had to go for it."""
    floors = read("a", status_of(LOW_1, "a", FLOOR), status_of(LOW_2, "a", FLOOR))
    return (chosen(), chosen("a"), floors, ended("stop"), read("a", status_of(LOW_1, "a", FLOOR)), LAPSE)


def test_after_a_preemption_too_it_is_removed_before_the_end() -> None:
    events = (*preempted(), draining(read("a", status_of(LOW_1, "a", FLOOR))), ended("delete"), ended("reinflate"))
    said, state, _ = run(placement(spec_of("high-1", cpu_cores=5.3)), *events)
    assert said[-3:] == ["remove high-1 a", "reinflate a", "finish"]
    assert isinstance(state.instruction, Finish)
    assert state.instruction.state is OperationState.FAILED


def test_a_victim_that_cannot_go_then_does_not_hide_the_start() -> None:
    back = read("a", status_of(LOW_1, "a", FLOOR), status_of(spec_of("late", "deflatable", 2.0), "a", FLOOR))
    cannot = HostFailed(0.0, "a is silent", uncertain=True)
    said, state, _ = run(placement(spec_of("high-1", cpu_cores=5.3)), *preempted(), back, cannot, cannot)
    assert "preempt" in said[-3]
    assert said[-2:] == ["remove high-1 a", "finish"]
    assert isinstance(state.instruction, Finish)
    assert "may have been started on a" in state.instruction.sentence


def test_room_that_has_come_elsewhere_is_looked_for_once_the_start_cannot_come() -> None:
    known = (chosen(), chosen("a"), read("a"), LAPSE)
    floors = read("a", status_of(LOW_1, "a", FLOOR), status_of(LOW_2, "a", FLOOR))
    state = placement(spec_of("high-1", cpu_cores=5.3))
    said, _, _ = run(state, *known, replace(floors, elsewhere="b"), ended("delete"))
    assert said[-2:] == ["remove high-1 a", "read-host b"]

"""A preemption that is called off leaves its host as it was; a placement that is after one ends as any other."""

from __future__ import annotations

import pytest

from cluster_manager.plans.plans import CalledOff, Event, Finish, Forgotten, HostFailed, Note
from ebbtide.messages.operations import OperationState
from ebbtide.messages.problem_codes import ReasonCode
from tests.manager.plan_events import chosen, ended, placement, read, spec_of, status_of
from tests.manager.plans.test_plans import FLOOR, LOW_1, LOW_2, run


def test_a_host_whose_preemption_was_called_off_gives_back_what_was_taken_meanwhile() -> None:
    floors = read("a", status_of(LOW_1, "a", FLOOR), status_of(LOW_2, "a", FLOOR))
    known = (chosen(), chosen("a"), floors, ended("stop", OperationState.PARTIAL))
    said, state, effects = run(
        placement(spec_of("high-1", cpu_cores=5.3)), *known, HostFailed(0.0, "trouble", False), ended("reinflate")
    )
    assert said[3:] == ["preempt low-2 a", "read-host a", "reinflate a", "finish"]
    assert "preemption-withdrawn" in [one.kind for one in effects if isinstance(one, Note)]
    assert state.finished


@pytest.mark.parametrize("started", [False, True])
def test_a_placement_that_is_called_off_after_a_vm_had_to_go_says_so(started: bool) -> None:
    """Not that it was refused for lack of room."""
    floors = read("a", status_of(LOW_1, "a", FLOOR), status_of(LOW_2, "a", FLOOR))
    events: tuple[Event, ...] = (chosen(), chosen("a"), floors, ended("stop"))
    if started:
        events = (*events, read("a", status_of(LOW_1, "a", FLOOR)), Forgotten(0.0, lapse=True))
    events = (*events, CalledOff(1.0), *([ended("delete")] if started else []), ended("reinflate"))
    said, state, effects = run(placement(spec_of("high-1", cpu_cores=5.3)), *events)
    assert said[-2:] == ["reinflate a", "finish"], "what came free is shared"
    assert isinstance(end := state.instruction, Finish)
    assert (end.sentence, end.reason) == ("the placement of high-1 was called off", ReasonCode.CALLED_OFF)
    kinds = [effect.kind for effect in effects if isinstance(effect, Note)]
    assert ("called-off" in kinds, "refused" in kinds) == (True, False)

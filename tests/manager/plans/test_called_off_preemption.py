"""A preemption that is called off leaves its host as it was."""

from __future__ import annotations

from cluster_manager.plans.plans import HostFailed, Note
from ebbtide.messages.operations import OperationState
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

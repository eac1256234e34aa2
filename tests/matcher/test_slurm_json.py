"""What Slurm's programs print, in the form of 22.05 and in the newer one, where states are lists."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.matcher.engines.slurm_json import jobs_of, machines_of
from ebbtide.matcher.match.attempts import AttemptState


def job(state: Any, **more: Any) -> dict[str, Any]:
    return {"jobs": [{"job_id": 7, "name": "ebb.train.0a.1", "job_state": state, "nodes": "n1", "cpus": 2, **more}]}


@pytest.mark.parametrize(
    ("state", "more", "seen", "code"),
    [
        ("RUNNING", {}, AttemptState.RUNNING, None),
        (["RUNNING"], {}, AttemptState.RUNNING, None),
        # It ends, and its processes are still there: 22.05 says COMPLETING alone.
        (["CANCELLED", "COMPLETING"], {}, AttemptState.RUNNING, None),
        (["PENDING"], {"priority": {"set": True, "number": 0}}, AttemptState.HELD, None),
        (["COMPLETED"], {"exit_code": {"return_code": {"set": True, "number": 0}}}, AttemptState.ENDED, 0),
        (["FAILED"], {"exit_code": {"return_code": {"set": True, "number": 7}}}, AttemptState.ENDED, 7),
        ([], {}, AttemptState.ENDED, None),
        ([None, 7], {}, AttemptState.ENDED, None),
    ],
)
def test_the_state_of_a_job_is_a_word_or_a_list_of_words(
    state: Any, more: dict[str, Any], seen: AttemptState, code: int | None
) -> None:
    (found,) = jobs_of(job(state, **more))
    assert (found.seen.state, found.seen.exit_code) == (seen, code)
    assert found.held_cores == ({"n1": 2} if seen is AttemptState.RUNNING else {})


def test_a_job_that_is_suspended_runs_and_is_known_to_stand_still() -> None:
    for state in ("SUSPENDED", ["RUNNING", "SUSPENDED"], ["STOPPED"]):
        (found,) = jobs_of(job(state))
        assert found.seen.state is AttemptState.RUNNING
    (found,) = jobs_of(job(["SUSPENDED"]))
    assert found.seen.suspended


@pytest.mark.parametrize(
    ("node", "up", "drained"),
    [
        ({"state": "idle", "state_flags": []}, True, ""),
        ({"state": ["IDLE"]}, True, ""),
        ({"state": ["MIXED", "DRAIN"], "reason": "new disks"}, True, "new disks"),
        ({"state": ["DOWN", "NOT_RESPONDING"]}, False, ""),
        ({"state": ["IDLE", "NOT_RESPONDING"]}, False, ""),
    ],
)
def test_the_state_of_a_node_is_a_word_with_flags_or_one_list(node: dict[str, Any], up: bool, drained: str) -> None:
    (found,) = machines_of({"nodes": [{"name": "n1", "cpus": 4, "gres": "vcore:4", **node}]})
    assert (found.up, found.drained, found.usable_cores) == (up, drained, 4)

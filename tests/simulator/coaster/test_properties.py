"""Properties under any jobs: every task runs once, on a server that may have it, and the loop is the same compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.coaster.model import MODEL
from ebbtide.simulator.coaster.running import POLICIES, RULES, Run, Terms, run
from ebbtide.simulator.coaster.workload import Mixed
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.model import checked, model_named

LITTLE = Mixed(load=0.95, hours=3.0, long_share=0.15, long_mean_s=400.0, cutoff_s=60.0)


def told(seed: int, compile: bool, policy: str = "cloudcoaster", hours: float = 3.0, **terms: Any) -> Run:
    given = {"servers": 24, "short_servers": 4, "threshold": 0.4, "cutoff_s": 60.0, "provisioning_s": 60.0} | terms
    jobs = replace(LITTLE, hours=hours).batches(np.random.default_rng(seed), 24)
    return run(jobs, Terms(policy=policy, validate=True, **given), seed, compile=compile)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rules", RULES)
def test_servers_run_one_task_at_a_time_and_long_ones_where_they_may(seed: int, policy: str, rules: str) -> None:
    found = told(seed, True, policy, rules=rules)
    state, (fixed, short, most) = found.state, found.terms.sizes
    jobs = np.repeat(np.arange(len(state.at_s)), np.diff(state.offsets))
    begun = state.at_s[jobs] + state.waited_s
    assert (state.waited_s >= 0).all()
    assert (state.ran_on < fixed + most).all()
    long = found.long[jobs]
    assert ((state.ran_on[long] >= short) & (state.ran_on[long] < fixed)).all()
    order = np.lexsort((begun, state.ran_on))
    same_server = state.ran_on[order][1:] == state.ran_on[order][:-1]
    ends = (begun + state.runtime_s)[order][:-1]
    assert (begun[order][1:] >= ends - 1e-6)[same_server].all()
    assert found.metrics["transient_peak"] <= most
    if found.terms.transient:
        assert (state.ran_on >= fixed).any()
        assert 0 < found.metrics["transient_mean"] <= most


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shortest": False},
        {"sticky": False},
        {"provisioning_s": 0.0},
        {"rules": "simulator"},
        {"policy": "by-wait", "longest_wait_s": 5.0},
        {"rules": "simulator", "shortest": False, "sticky": False},
    ],
)
def test_compiled_and_interpreted_agree(options: dict[str, Any]) -> None:
    one, other = (told(9, how, hours=0.7, **options) for how in (False, True))
    assert one.state.waited_s.tolist() == other.state.waited_s.tolist()
    assert one.state.ran_on.tolist() == other.state.ran_on.tolist()
    assert one.metrics == pytest.approx(other.metrics, nan_ok=True)


def test_transient_servers_shorten_the_waits_of_short_tasks() -> None:
    delays = {policy: np.mean([told(s, True, policy).metrics["delay_mean_s"] for s in range(4)]) for policy in POLICIES}
    assert delays["always-on"] < delays["cloudcoaster"] < delays["eagle"]
    assert delays["always-on"] < delays["by-wait"] < delays["eagle"]


SMALL: dict[str, Any] = {"servers": 30, "short_servers": 4, "load": 0.9, "hours": 1, "long_mean_s": 500}


def test_it_is_there_by_its_name_and_a_seed_says_it_all() -> None:
    assert model_named("coaster") is MODEL
    found = [checked(MODEL.run(MODEL.settings(SMALL), 3, None, lambda share: None)).metrics for _ in range(2)]
    assert found[0] == pytest.approx(found[1], nan_ok=True)
    assert found[0]["short_tasks"] > 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policy": "sparrow"}, "policy"),
        ({"hours": 0}, "hours"),
        ({"server": 1}, "server"),
        ({"probe_ratio": 0}, "probe"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter, match=field):
        MODEL.settings(SMALL | changes)

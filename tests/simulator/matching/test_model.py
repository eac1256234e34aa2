"""The matcher as a model of experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.document import read
from ebbtide.simulator.experiments.model import Input, checked, model_named
from ebbtide.simulator.matching.model import MODEL

DAY_S = 86_400.0
ROOT = Path(__file__).parents[3]


@pytest.fixture
def vms(tmp_path: Path) -> Input:
    generator = np.random.default_rng(4)
    arrives_s = np.sort(generator.integers(0, 900, 5000)) * 300
    lines = ["arrival_s,batch,cores,mem_gb,dur_lo_s,dur_hi_s,censored,dur_s"]
    for number, at_s in enumerate(arrives_s.tolist()):
        cores, lasts_s = generator.choice([1, 2, 4]), int(generator.exponential(20.0) + 1) * 300
        lines.append(f"{at_s},{number},{cores},2.0,{lasts_s},{lasts_s},0,{lasts_s}")
    path = tmp_path / "vms.csv"
    path.write_text("\n".join(lines) + "\n")
    return Input(path)


def given(vms: Input, **changes: Any) -> dict[str, Any]:
    small = {
        "servers": 15,
        "machines": 5,
        "share": 1.0,
        "cpu_cores": 32.0,
        "from_s": 0.25 * DAY_S,
        "until_s": 2.5 * DAY_S,
    }
    jobs = {"jobs": 3, "least_tasks": 2, "most_tasks": 4, "most_task_s": 900.0, "load": 0.3, "policy": "random"}
    return {"inputs": {"vms": vms}, **small, **jobs, "policy": "capacity-random", **changes}


def test_a_run_gives_completion_times_waste_and_the_pools_statistics(
    vms: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))
    case = MODEL.settings(given(vms))
    seen: list[float] = []
    prepared = MODEL.prepare([case, case], seen.append)
    assert seen[-1] == 1.0
    outcome = checked(MODEL.run(case, 1, prepared, seen.append))
    assert outcome.metrics["jct_mean_s"] > 0
    assert outcome.metrics.keys() <= set(MODEL.metrics)
    assert outcome.metrics["pool_changes"] > 0
    assert len(outcome.tables["jobs"]["completion_s"]) == 3
    again = checked(MODEL.run(case, 1, prepared, seen.append))
    assert again.metrics.keys() == outcome.metrics.keys()
    assert again.metrics["jct_mean_s"] == outcome.metrics["jct_mean_s"]


@pytest.mark.parametrize("acquirer", [{}, {"acquirer": True, "least_machines": 5, "most_machines": 5}])
def test_jobs_that_are_not_done_stand_beside_the_means_and_are_warned_of(
    vms: Input, acquirer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each machine has one core: most jobs want more."""
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))
    case = MODEL.settings(given(vms, cpu_cores=1.0, least_cpu_cores=0.0, share=0.01, jobs=10, load=0.5, **acquirer))
    outcome = checked(MODEL.run(case, 1, MODEL.prepare([case], lambda share: None), lambda share: None))
    assert outcome.metrics["jobs_done"] + outcome.metrics["jobs_left"] == 10
    assert outcome.metrics["jobs_left"] > 0
    assert "of 10 jobs are not done" in outcome.warnings[0]
    assert outcome.metrics.keys() <= set(MODEL.metrics)


def test_a_pool_that_goes_on_after_the_last_arrival_is_warned_of_and_one_that_begins_there_is_refused(
    vms: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the last VM departs."""
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))
    header, first, *rest = vms.path.read_text().splitlines()
    late = ",".join([*first.split(",")[:4], *["864000"] * 2, "0", "864000"])
    vms.path.write_text("\n".join([header, late, *rest]) + "\n")
    for until_s, count in ((2.5, 0), (6.0, 1)):
        case = MODEL.settings(given(vms, until_s=until_s * DAY_S))
        outcome = checked(MODEL.run(case, 1, MODEL.prepare([case], lambda share: None), lambda share: None))
        said = [one for one in outcome.warnings if "the last VM of the trace arrives at 2697" in one]
        assert len(said) == count
    with pytest.raises(InvalidParameter, match="from_s"):
        MODEL.prepare([MODEL.settings(given(vms, from_s=4 * DAY_S, until_s=6 * DAY_S))], lambda share: None)


def test_a_seed_that_has_anothers_pool_again_is_warned_of(
    vms: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intervals over such seeds would be too narrow."""
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))
    case = MODEL.settings(given(vms, pools=2))
    prepared = MODEL.prepare([case], lambda share: None)
    found = {seed: MODEL.run(case, seed, prepared, lambda share: None) for seed in (0, 1, 2, 3)}
    again = {seed: any("have the pools of those again" in one for one in found[seed].warnings) for seed in found}
    assert again == {0: True, 1: False, 2: False, 3: True}


def test_an_acquirer_has_all_servers_to_choose_from(
    vms: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))
    case = MODEL.settings(given(vms, acquirer=True, least_machines=5, most_machines=5, replaced_share=0.2))
    outcome = checked(MODEL.run(case, 1, MODEL.prepare([case], lambda share: None), lambda share: None))
    assert outcome.metrics["machines_given_back"] > 5
    assert outcome.metrics.keys() <= set(MODEL.metrics)
    assert outcome.metrics["machines_held_mean"] == pytest.approx(5.0, abs=1.0)
    assert len(outcome.tables["held"]["cores"]) > 100


def test_the_experiment_on_costs_says_what_kinds_there_are(vms: Input) -> None:
    experiment = read(ROOT / "experiments" / "costs-persistent.toml", inputs={"vms": vms.path})
    cases = {case.given["vm_kind"]: MODEL.settings(case.given) for case in experiment.cases()}
    assert cases.keys() == {"spot", "harvest", "regular"}
    found = cases["spot"].acquisition
    assert found is not None
    assert (found.kind.value, found.vm_cores, found.removal.value) == ("spot", (2, 4, 8), "random")
    assert cases["regular"].workload.rate_factors == (1, 4)


@pytest.mark.parametrize("name", ["costs-persistent", "costs-others"])
def test_each_case_of_the_experiments_on_costs_has_whole_periods_of_the_rate(vms: Input, name: str) -> None:
    experiment = read(ROOT / "experiments" / f"{name}.toml", inputs={"vms": vms.path})
    for case in experiment.cases():
        found = MODEL.settings(case.given).workload
        assert found.window_s is not None
        assert found.window_s % (len(found.rate_factors) * found.rate_period_s) == 0
        assert found.warnings(found.window_s) == ()


@pytest.mark.parametrize(("hours", "warned"), [(3, True), (4, False)])
def test_a_run_in_which_the_rate_hardly_alternates_warns(
    vms: Input, hours: float, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))
    rates = given(vms, rate_factors=[1, 4], rate_period_s=3600, window_h=hours)
    del rates["jobs"]
    case = MODEL.settings(rates)
    outcome = checked(MODEL.run(case, 1, MODEL.prepare([case], lambda share: None), lambda share: None))
    assert outcome.metrics["span_s"] == 3600 * hours
    assert len(outcome.warnings) == warned


@pytest.mark.parametrize(
    ("field", "value"),
    [("vm_kind", "cheap"), ("removal", "first"), ("vm_cores", [2.5]), ("vm_cores", [0]), ("spot_discount", 1.0)],
)
def test_a_bad_setting_of_the_acquirer_names_its_field(vms: Input, field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=field):
        MODEL.settings(given(vms, acquirer=True, **{field: value}))


def power(tmp_path: Path, values: list[float]) -> Input:
    """A value every half day."""
    path = tmp_path / "power.csv"
    lines = ["at_s,value", *(f"{number * 43_200},{value}" for number, value in enumerate(values))]
    path.write_text("\n".join(lines) + "\n")
    return Input(path)


def test_power_makes_another_pool_and_its_figures_stand_beside_the_pools(
    vms: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))
    wind = power(tmp_path, [20, 4, 16, 10, 14, 12, 16])
    plain = given(vms)
    cases = [MODEL.settings(plain)]
    for cut in ("servers", "even"):
        cases.append(MODEL.settings({**plain, "inputs": {"vms": vms, "power": wind}, "power_cut": cut}))
    prepared = MODEL.prepare(cases, lambda share: None)
    without, servers, even = (checked(MODEL.run(case, 1, prepared, lambda share: None)).metrics for case in cases)
    assert "pool_power_mean" not in without
    assert servers.keys() <= set(MODEL.metrics)
    # The jobs come from day 1.5 on, when power is 10 of 20 and rises.
    assert servers["pool_power_least"] == pytest.approx(0.5, abs=0.01)
    assert servers["pool_power_least"] < servers["pool_power_mean"] < 0.7
    assert servers["pool_mean_cores"] < without["pool_mean_cores"]
    assert servers["pool_vms_evicted"] > 0
    # The first one cuts few servers much.
    assert servers["pool_change_mean_cores"] > even["pool_change_mean_cores"]


def test_power_is_set_only_where_there_is_a_trace_of_it(vms: Input, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="power_cut"):
        MODEL.settings(given(vms, power_cut="even"))
    inputs = {"vms": vms, "power": power(tmp_path, [1, 1])}
    for field, value in (("power_cut", "some"), ("power_from_s", -1.0), ("power_step_s", 1.0)):
        with pytest.raises(InvalidParameter, match=field):
            MODEL.settings(given(vms, inputs=inputs, **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "best"),
        ("packing", "tight"),
        ("servers", 0),
        ("load", -1.0),
        ("machines", 99),
        ("colour", 1),
        ("budget_cores", 9),
        ("estimate_error", 1.5),
        ("estimate_factor", 0),
        ("rate_factors", 4),
        ("rate_factors", [1, -1]),
        ("rate_factors", [1, "4"]),
        ("vm_kind", "spot"),
        ("window_h", -1),
    ],
)
def test_a_bad_setting_names_its_field(vms: Input, field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=field):
        MODEL.settings(given(vms, **{field: value}))


def test_a_window_and_a_number_of_jobs_do_not_go_together(vms: Input) -> None:
    with pytest.raises(InvalidParameter, match=r"jobs.*must not be stated with window_h"):
        MODEL.settings(given(vms, window_h=4))


def test_other_draws_are_refused_where_nothing_is_predicted_of_sizes(vms: Input) -> None:
    with pytest.raises(InvalidParameter, match=r"other_draws.*needs a policy that predicts with sizes"):
        MODEL.settings(given(vms, other_draws=3))
    assert MODEL.settings(given(vms, other_draws=3, policy="live")).other_draws == 3


def test_who_knows_the_vms_to_come_needs_other_draws_and_has_all_machines(vms: Input) -> None:
    for wrong in ({}, {"other_draws": 1, "acquirer": True}):
        with pytest.raises(InvalidParameter, match=r"other_draws.*must be at least 1 with known"):
            MODEL.settings(given(vms, policy="known", **wrong))
    case = MODEL.settings(given(vms, policy="known", other_draws=1))
    outcome = checked(MODEL.run(case, 1, MODEL.prepare([case], lambda share: None), lambda share: None))
    assert "picked_known" not in outcome.metrics


def test_wrong_estimates_are_an_axis_like_others(vms: Input) -> None:
    experiment = read(ROOT / "experiments" / "estimates.toml", inputs={"vms": vms.path})
    workloads = [MODEL.settings(case.given).workload for case in experiment.cases()]
    assert {workload.estimate_error for workload in workloads} >= {0.0, 1.0}
    assert {workload.estimate_factor for workload in workloads} >= {0.5, 2.0}


def test_experiments_find_it_by_its_name() -> None:
    assert model_named("matching") is MODEL

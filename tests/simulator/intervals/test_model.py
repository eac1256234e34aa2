"""Interval-aware scheduling as a model of experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.model import Input, checked, model_named
from ebbtide.simulator.inputs.batches import SeriesBatch
from ebbtide.simulator.intervals.history import big_from, intervals
from ebbtide.simulator.intervals.model import MODEL
from ebbtide.simulator.intervals.platform import Carbon
from ebbtide.simulator.jobs.model import Walk

SMALL: dict[str, Any] = {
    "machines": 20,
    "cpu_cores": 8,
    "days": 6,
    "from_s": 86_400,
    "load": 0.7,
    "durations": "zipf",
    "exponent": 1.7,
    "history_days": 30,
}


def run(**changes: Any) -> dict[str, float]:
    return dict(checked(MODEL.run(MODEL.settings(SMALL | changes), 1, None, lambda share: None)).metrics)


def test_it_is_there_by_its_name() -> None:
    assert model_named("intervals") is MODEL


def test_caution_kills_less() -> None:
    bold, cautious = (run(aggressiveness=a, load=1.0)["kills"] for a in (0.9, 0.02))
    assert cautious < 0.5 * bold


def test_shares_of_capacity_add_up_and_a_seed_says_it_all() -> None:
    found = run()
    assert found["goodput"] + found["wasted_share"] + found["idle_share"] == pytest.approx(1)
    assert found == pytest.approx(run(), nan_ok=True)


def test_capacity_follows_a_carbon_budget(tmp_path: Path) -> None:
    header = (Path(__file__).parents[1] / "data" / "carbon_miso.csv").read_text().splitlines()[0]
    lines = [header]
    for hour in range(240):
        at, value = f"2024-04-{1 + hour // 24:02d} {hour % 24:02d}:00:00", 400 + 300 * (hour % 24 > 11)
        lines.append(f"{at},USA,Midcontinent ISO,US-MIDW-MISO,{value},{value},31,15,eia.gov,False,")
    path = tmp_path / "carbon.csv"
    path.write_text("\n".join(lines) + "\n")
    series = Input(path)
    found = run(inputs={"carbon": series}, history_days=0, carbon_from_s=86_400.0, policy="first-fit")
    assert found["changes"] > 20
    with pytest.raises(InvalidParameter, match="capacity_start must be below 1"):
        MODEL.settings(SMALL | {"inputs": {"carbon": series}, "history_days": 0, "capacity_start": 1.0})
    with pytest.raises(InvalidParameter, match="history_days"):
        MODEL.settings(SMALL | {"inputs": {"carbon": series}})


def test_a_window_that_begins_between_two_values_of_a_series_begins_with_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "carbon.csv"
    path.write_text("at_s,value\n0,100\n3600,400\n10800,100\n14400,100\n")
    shares = Carbon(Input(path), from_s=7200.0, mean=0.5, every_s=3600.0).shares(10_800.0)
    assert shares.at_s.tolist() == [0, 3600, 7200]
    assert shares.value.tolist() == pytest.approx([1 / 6, 2 / 3, 2 / 3])
    with pytest.raises(InvalidParameter, match=r"carbon_from_s is 18000, but the last value .* comes at 14400"):
        Carbon(Input(path), from_s=18_000.0, mean=0.5, every_s=3600.0).shares(7200.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"changes_per_h": 2}, "changes_per_h is 2, .* every 1800 s, but the series of carbon has a step of 3600 s"),
        ({"carbon_from_s": 1800}, "carbon_from_s is 1800; .* whole steps of 3600 s after it, and one comes at 3600 s"),
    ],
)
def test_a_series_that_is_not_in_step_with_the_switches_is_refused_before_the_first_run(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "carbon.csv"
    path.write_text("\n".join(["at_s,value", *(f"{3600 * hour},{100 + hour}" for hour in range(200))]) + "\n")
    given = SMALL | {"inputs": {"carbon": Input(path)}, "history_days": 0}
    MODEL.prepare([MODEL.settings(given)], lambda share: None)
    with pytest.raises(InvalidParameter, match=sentence):
        MODEL.prepare([MODEL.settings(given | changes)], lambda share: None)


def on_two_machines(tmp_path: Path) -> dict[str, float]:
    """A window from 12 to 24 h on two machines of 4 cores, the second on until 25 h; jobs of 30 h and of 20 h there."""
    carbon, jobs = tmp_path / "carbon.csv", tmp_path / "jobs.csv"
    lines = [f"{3600 * hour},{100 if 12 <= hour < 25 else 200}" for hour in range(200)]
    carbon.write_text("\n".join(["at_s,value", *lines]) + "\n")
    jobs.write_text(
        "id,submit_s,runtime_s,cpu_cores,task_runtime_s\n"
        "z,0,1,1,1\n"
        f"a,{12 * 3600},{30 * 3600},4,{30 * 3600}\n"
        f"b,{13 * 3600},{20 * 3600},4,{20 * 3600}\n"
    )
    given: dict[str, Any] = {
        "policy": "first-fit",
        "machines": 2,
        "cpu_cores": 4,
        "days": 1,
        "from_s": 12 * 3600,
        "capacity_start": 0.75,
        "inputs": {"carbon": Input(carbon), "jobs": Input(jobs)},
        "validate": True,
    }
    return dict(MODEL.run(MODEL.settings(given), 1, None, lambda share: None).metrics)


def test_what_is_under_way_when_the_window_ends_is_useful_only_if_it_completes(tmp_path: Path) -> None:
    found = on_two_machines(tmp_path)
    assert found["goodput"] == pytest.approx(12 * 4 / 96)
    assert found["wasted_share"] == pytest.approx(11 * 4 / 96)
    assert found["kills"] == found["kills_all"] == 0
    assert found["jobs_left"] == 0


def test_what_is_offered_is_the_work_that_comes_in_the_window_of_the_cores_that_are_there(tmp_path: Path) -> None:
    assert on_two_machines(tmp_path)["offered_share"] == pytest.approx((30 + 20) * 4 / 96)


@pytest.mark.parametrize("learns", [True, False])
def test_changes_and_intervals_are_counted_up_to_the_end_of_the_days_whatever_comes_then(learns: bool) -> None:
    """They are those of the walk that the seed has always given for so many days."""
    case = MODEL.settings(SMALL)
    assert isinstance(case.platform, Walk)
    shares = case.platform.shares(np.random.default_rng([1, 1]), 6 * 86_400.0)
    on = np.floor(shares.value * 20 + 1e-9)
    found = run(learns=learns)
    assert found["changes"] == on[0] + np.abs(np.diff(on)).sum()
    assert found["intervals"] == -np.diff(on).clip(max=0).sum()


def test_jobs_want_four_fifths_of_the_capacity_unless_told_otherwise() -> None:
    assert MODEL.settings({"days": 1}).load == 0.8


def test_a_trace_with_jobs_of_several_tasks_is_refused_before_the_first_run(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("id,submit_s,runtime_s,cpu_cores,task_runtime_s\na,0,60,1,60\nb,9,60,1,60;60\n")
    with pytest.raises(InvalidParameter, match=r"inputs\.jobs has jobs of several tasks"):
        MODEL.prepare([MODEL.settings({"days": 1, "inputs": {"jobs": Input(path)}})], lambda share: None)


def test_history_of_a_walk_by_hand() -> None:
    """Two of four machines on at 0 h, four from 1 h, one from 3 h: machines 3, 2 last two steps, machine 1 three."""
    shares = SeriesBatch(at_s=np.arange(4, dtype=np.float64) * 3600.0, value=np.array([0.5, 1.0, 1.0, 0.25]))
    found = intervals([shares], 4, 0, 3600.0)
    assert found[0, :5].tolist() == [0, 0, 2, 1, 0]
    bands = intervals([shares], 4, 0, 3600.0, bands=2)
    assert bands[0, :5].tolist() == [0, 0, 0, 1, 0]
    assert bands[1, :5].tolist() == [0, 0, 2, 0, 0]


def test_big_jobs_are_those_that_have_the_share() -> None:
    work = np.array([1.0, 5.0, 2.0, 2.0])
    assert big_from(work, 0.5) == 5.0
    assert big_from(work, 0.6) == 2.0
    assert big_from(work, 0.0) == np.inf
    assert big_from(work, 1.5) == 0.0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policy": "h9"}, "policy"),
        ({"aggressiveness": 1.5}, "aggressiveness"),
        ({"bands": 0}, "bands"),
        ({"capacity_most": 0.3}, "capacity_most"),
        ({"most_tasks": 2}, "most_tasks must be 1 here"),
        ({"job_cores": [1.5]}, "job_cores must be a list of whole numbers"),
        ({"days": 0}, "days"),
        ({"inputs": {"vms": 1}}, "inputs.vms"),
        ({"machine": 1}, "machine"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter, match=field):
        MODEL.settings(SMALL | changes)

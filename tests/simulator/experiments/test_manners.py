"""Manners of the models on other people's traces: where they begin, what is left out, what need not be said twice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from ebbtide.cli import main
from ebbtide.simulator.errors import ExperimentError, InvalidParameter
from ebbtide.simulator.experiments import document, run
from ebbtide.simulator.experiments.model import Input, Outcome, model_named
from ebbtide.simulator.experiments.results import Results
from ebbtide.simulator.inputs.traces import Trace
from ebbtide.simulator.jobs.facts import known, since, supplied

ROOT = Path(__file__).parents[3]
#: (submitted, runtime, cores).
JOBS = ((0, 3600, 4), (300, 600, 2), (4000, 7200, 30), (8000, 600, 8))
WORK = sum(runtime * cores for _, runtime, cores in JOBS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))


def trace(tmp_path: Path, by_s: float = 0.0, jobs: Any = JOBS) -> Path:
    path = tmp_path / f"jobs-{by_s:g}.csv"
    rows = [f"job-{i},{at + by_s},{runtime},{cores},{runtime}" for i, (at, runtime, cores) in enumerate(jobs)]
    path.write_text("\n".join(["id,submit_s,runtime_s,cpu_cores,task_runtime_s", *rows]) + "\n")
    return path


def capacity(tmp_path: Path, begin_s: float = 0.0) -> Path:
    path = tmp_path / f"capacity-{begin_s:g}.csv"
    changes = ("a,0,8", "b,0,4", "a,500,0", "a,900,8", "b,5000,8")
    rows = [f"{name},{float(at) + begin_s},{cores}" for name, at, cores in (one.split(",") for one in changes)]
    path.write_text("\n".join(["machine,at_s,cpu_cores", *rows]) + "\n")
    return path


def outcome(model: str, **given: Any) -> Outcome:
    found = model_named(model)
    settings = found.settings(given)
    return found.run(settings, 1, found.prepare([settings], lambda share: None), lambda share: None)


ON_TRACES: dict[str, dict[str, Any]] = {
    "jobs": {"machines": 2, "cpu_cores": 16, "from_s": 200.0},
    "waiting": {"machines": 1, "cpu_cores": 16, "policy": "both-tried-after", "from_s": 200.0},
    "intervals": {"machines": 10, "cpu_cores": 16, "days": 1, "history_days": 5, "from_s": 200.0},
    "coaster": {"servers": 20, "short_servers": 4},
}


@pytest.mark.parametrize("model", sorted(ON_TRACES))
def test_a_trace_begins_at_its_first_row(model: str, tmp_path: Path) -> None:
    early, late = (
        outcome(model, **ON_TRACES[model], inputs={"jobs": Input(trace(tmp_path, by_s))}).metrics
        for by_s in (0.0, 864_000.0)
    )
    assert late == pytest.approx(dict(early), nan_ok=True)


@pytest.mark.parametrize("model", ["jobs", "waiting", "intervals"])
def test_a_window_outside_of_the_trace_is_an_error_before_the_first_run(model: str, tmp_path: Path) -> None:
    path = tmp_path / "late.toml"
    lines = [f"{key} = {value!r}" for key, value in (ON_TRACES[model] | {"from_s": 8001.0}).items() if key != "policy"]
    path.write_text(f"[experiment]\nname='late'\nmodel='{model}'\n[settings]\n" + "\n".join(lines) + "\n")
    with pytest.raises(ExperimentError, match=r"settings.from_s .*last job.* 8000"):
        run(path, output=tmp_path / "out", inputs={"jobs": trace(tmp_path, 77.0)}, workers=0)
    assert not list((tmp_path / "out").glob("runs/*"))


def test_a_window_that_ends_before_the_trace_begins_or_after_it_has_ended(tmp_path: Path) -> None:
    given = ON_TRACES["jobs"] | {"inputs": {"jobs": Input(trace(tmp_path))}}
    with pytest.raises(InvalidParameter, match="to_s must be after the first job"):
        outcome("jobs", **given | {"from_s": -100.0, "to_s": 0.0})
    (said,) = [one for one in outcome("jobs", **given | {"to_s": 9000.0}).warnings if "what is measured" in one]
    assert "9000 s" in said
    assert "8000 s" in said
    assert not outcome("jobs", **given | {"to_s": 8000.0, "cpu_cores": 32}).warnings


def carbon(tmp_path: Path, hours: int) -> Path:
    path = tmp_path / f"carbon-{hours}.csv"
    rows = [f"{3600 * hour},{400 + 300 * (hour % 4 > 1)}" for hour in range(hours)]
    path.write_text("\n".join(["at_s,value", *rows]) + "\n")
    return path


ON_CARBON: dict[str, Any] = ON_TRACES["intervals"] | {"history_days": 0, "from_s": 0.0, "policy": "first-fit"}


def test_a_series_that_ends_before_its_window_begins_is_an_error_before_the_first_run(tmp_path: Path) -> None:
    path = tmp_path / "late.toml"
    given = ON_CARBON | {"carbon_from_s": 24 * 3600}
    lines = [f"{key} = {value!r}" for key, value in given.items()]
    inputs = {"jobs": trace(tmp_path), "carbon": carbon(tmp_path, 24)}
    lines += [f"[inputs]\njobs = '{inputs['jobs']}'\ncarbon = '{inputs['carbon']}'"]
    path.write_text("[experiment]\nname='late'\nmodel='intervals'\n[settings]\n" + "\n".join(lines) + "\n")
    with pytest.raises(ExperimentError, match=r"settings.carbon_from_s is 86400, .*last value.* 82800 s"):
        run(path, output=tmp_path / "out", workers=0)
    assert not list((tmp_path / "out").glob("runs/*"))


def test_a_series_that_ends_within_its_window_is_a_warning(tmp_path: Path) -> None:
    jobs = trace(tmp_path, 0.0, (*JOBS[:2], (86_000, 7200, 4)))

    def said(hours: int) -> list[str]:
        inputs = {"jobs": Input(jobs), "carbon": Input(carbon(tmp_path, hours))}
        return [one for one in outcome("intervals", **ON_CARBON, inputs=inputs).warnings if "series" in one]

    (within,) = said(20)
    assert within.startswith("what is measured ends at 86400 s, and the series of carbon ends at 72000 s")
    # A job is under way at the end of the window.
    (behind,) = said(24)
    assert behind.startswith("what was under way at the end of the window runs until 93200 s")
    assert "ends at 86400 s" in behind
    assert not said(30)


def test_capacity_that_ends_within_its_window_is_a_warning(tmp_path: Path) -> None:
    inputs = {"jobs": Input(trace(tmp_path)), "capacity": Input(capacity(tmp_path))}

    def said(**given: float) -> list[str]:
        return [one for one in outcome("jobs", inputs=inputs, **given).warnings if "trace of capacity" in one]

    assert not said(to_s=5000.0)
    (to_6000,) = said(to_s=6000.0)
    assert "comes at 5000 s; from then to 6000 s" in to_6000
    # Without an end, the window is as long as jobs come.
    (to_the_last,) = said()
    assert "from then to 8000 s" in to_the_last


def test_jobs_that_wait_long_after_the_last_change_are_a_warning(tmp_path: Path) -> None:
    """What is left of them is done on machines that stand still: of a trace, and of a walk."""
    many = trace(tmp_path, jobs=[(60 * n, 7200, 8) for n in range(100)])
    inputs = {"jobs": Input(many), "capacity": Input(capacity(tmp_path))}
    found = outcome("jobs", inputs=inputs)
    assert found.metrics["ended_s"] > 100_000
    assert f"to {found.metrics['ended_s']:g} s machines stay as they are" in found.warnings[-1]
    walk: dict[str, Any] = {"machines": 4, "cpu_cores": 8, "capacity": "walk", "capacity_interval_s": 600}
    found = outcome("jobs", inputs={"jobs": Input(many)}, **walk)
    (said,) = (one for one in found.warnings if "machines stay as they are" in one)
    assert said.startswith("the walk ends at 5940 s")
    assert said in outcome("jobs", inputs={"jobs": Input(many)}, to_s=1e9, **walk).warnings
    few = trace(tmp_path, 1.0, jobs=[(600 * n, 60, 8) for n in range(100)])
    assert not outcome("jobs", inputs={"jobs": Input(few)}, **walk).warnings
    assert not outcome("jobs", inputs={"jobs": Input(many)}, to_s=5000.0, **walk).warnings


def test_a_window_of_steady_outside_of_the_trace_is_an_error_before_the_first_run(tmp_path: Path) -> None:
    path = tmp_path / "vms.csv"
    path.write_text("id,arrives_s,departs_s,cpu_cores,memory_mib\na,0,9000,1,1024\nb,500,9000,1,1024\n")
    given = {"inputs": {"vms": Input(path)}, "window_from_s": 501.0, "window_until_s": 600.0}
    with pytest.raises(InvalidParameter, match=r"window_from_s is 501, .*last VM.* arrives at 500 s"):
        outcome("steady", **given)


@pytest.mark.parametrize("model", ["waiting", "intervals"])
def test_a_window_outside_of_made_jobs_is_an_error_of_the_settings(model: str) -> None:
    made = {"load": 0.5, "days": 2, "job_cores": [1], "from_s": 2 * 86_400.0}
    with pytest.raises(InvalidParameter, match="from_s"):
        model_named(model).settings(made)


def test_the_load_of_a_trace_is_measured(tmp_path: Path) -> None:
    """What the stable machines are sized for follows the trace, not a default of .8."""
    jobs = [(600.0 * i, 3600.0 * (1 + i % 5), 4) for i in range(200)]
    given = {"machines": 20, "cpu_cores": 8, "days": 2, "history_days": 5, "policy": "h1"}
    path = Input(trace(tmp_path, 0.0, jobs))
    early = sum(runtime * cores for at_s, runtime, cores in jobs if at_s < 2 * 86_400)
    found = outcome("intervals", **given, inputs={"jobs": path}).metrics
    assert found["offered_load"] == pytest.approx(early / (600.0 * 199) / (0.7 * 20 * 8))
    light = outcome("intervals", **given | {"machines": 80}, inputs={"jobs": path}).metrics
    assert light["offered_load"] == pytest.approx(found["offered_load"] / 4)
    assert light["big_core_h"] < found["big_core_h"]
    with pytest.raises(InvalidParameter, match="load is unknown"):
        outcome("intervals", **given, load=0.8, inputs={"jobs": path})


def test_what_is_left_out_is_said_with_its_share_of_the_work(tmp_path: Path) -> None:
    share = 30 * 7200 / WORK
    for model in ("jobs", "intervals"):
        found = outcome(model, **ON_TRACES[model], inputs={"jobs": Input(trace(tmp_path))})
        assert found.metrics["jobs_refused"] == 1
        assert found.metrics["refused_work_share"] == pytest.approx(share)
        assert (
            f"1 of 4 jobs want more cores than the 16 of the largest machine and are left out, with {share:.1%}"
            in (found.warnings[0])
        )
    assert (
        "4 of 4 jobs want more than one core a task"
        in (outcome("coaster", **ON_TRACES["coaster"], inputs={"jobs": Input(trace(tmp_path))}).warnings[0])
    )


def test_what_is_left_out_is_in_no_load_and_a_part_of_a_core_is_a_whole_one(tmp_path: Path) -> None:
    given = ON_TRACES["intervals"] | {"from_s": 0.0}
    whole = ((0, 3600, 4), (300, 600, 2), (8000, 600, 8))
    wide = ((0, 3600, 4), (300, 600, 1.5), (4000, 7200, 30), (8000, 600, 8))
    one, other = (
        outcome("intervals", **given, inputs={"jobs": Input(trace(tmp_path, by_s, jobs))}).metrics
        for by_s, jobs in ((0.0, whole), (1.0, wide))
    )
    assert other["offered_load"] == pytest.approx((3600 * 4 + 600 * 2 + 600 * 8) / 8000 / (0.7 * 10 * 16))
    for name in ("jobs_measured", "offered_load", "offered_share", "failure_rate", "big_core_h"):
        assert other[name] == pytest.approx(one[name])


def test_machines_are_rented_for_jobs_that_no_fixed_one_holds(tmp_path: Path) -> None:
    jobs = Input(trace(tmp_path))
    for policy in ("all-jobs-wait", "both", "both-tried-after", "both-tried-forest"):
        given = ON_TRACES["waiting"] | {"policy": policy, "from_s": 0.0, "validate": True, "machines": 3}
        found = outcome("waiting", **given, inputs={"jobs": jobs}).metrics
        assert (found["jobs"], found["jobs_refused"], found["too_large"]) == (4, 0, 1)
        # Thirty cores are the 32 of an m5.8xlarge for two hours.
        assert found["on_demand_cost"] == pytest.approx(32 * 2 * 0.048)


def test_machines_are_rented_for_memory_that_no_fixed_one_has(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("id,submit_s,runtime_s,cpu_cores,memory_mib,task_runtime_s\na,0,60,1,9000,60\nb,1,60,1,100,60\n")
    given = {"machines": 1, "cpu_cores": 4, "memory_mib": 8192, "policy": "all-jobs-wait", "validate": True}
    found = outcome("waiting", **given, inputs={"jobs": Input(path)}).metrics
    assert (found["jobs"], found["too_large"], found["waited_share"]) == (2, 1, 0)


def test_a_capacity_input_says_which_machines_there_are(tmp_path: Path) -> None:
    inputs = {"jobs": Input(trace(tmp_path)), "capacity": Input(capacity(tmp_path))}
    found = outcome("jobs", inputs=inputs)
    assert (found.metrics["jobs_done"], found.metrics["jobs_refused"]) == (3, 1)
    assert "than the 8 of the largest machine" in found.warnings[0]
    # Made jobs are as many as its mean capacity holds.
    made = {"load": 0.5, "days": 5.0, "job_cores": [1], "durations": "uniform", "least_s": 60, "most_s": 600}
    assert outcome("jobs", **made, inputs={"capacity": inputs["capacity"]}).metrics["utilisation"] == pytest.approx(
        0.5, rel=0.1
    )


def test_the_load_is_one_on_the_whole_cores_that_jobs_run_on(tmp_path: Path) -> None:
    """Of 1.9 cores a machine one is used."""
    path = tmp_path / "parts.csv"
    path.write_text("\n".join(["machine,at_s,cpu_cores", *(f"m{n},{n},1.9" for n in range(20))]) + "\n")
    assert supplied(Input(path), 0.0, 1e9).mean_cores == pytest.approx(20.0)
    made = {"load": 0.5, "days": 5.0, "job_cores": [1], "durations": "uniform", "least_s": 60, "most_s": 600}
    found = outcome("jobs", **made, inputs={"capacity": Input(path)}).metrics
    assert found["utilisation"] == pytest.approx(0.5, rel=0.1)


def test_parts_of_cores_that_are_much_of_a_trace_are_a_warning(tmp_path: Path) -> None:
    """Requests of Google's traces are shares of a machine, which its reader takes for one core."""
    jobs, machines = tmp_path / "jobs.csv", tmp_path / "machines.csv"
    head = "id,submit_s,runtime_s,cpu_cores,memory_mib,task_runtime_s\n"
    jobs.write_text(head + "".join(f"{n},{n},60,0.25,1,60\n" for n in range(9)))
    machines.write_text("machine,at_s,cpu_cores\na,0,1.5\nb,0,0.5\n")
    given = {"jobs": Input(jobs), "capacity": Input(machines)}
    ours = [one for one in outcome("jobs", inputs=given).warnings if "whole cores" in one]
    assert [one.partition(" of what")[0] for one in ours] == [
        "in whole cores its tasks want +300% of work",
        "in whole cores its machines have -50% of capacity",
    ]
    waiting = outcome("waiting", machines=2, cpu_cores=4, inputs={"jobs": Input(jobs)})
    assert waiting.warnings[0].startswith("in whole cores its tasks want +300% of work of what the trace says")
    jobs.write_text(head + "".join(f"{n},{n},60,{n + 1},1,60\n" for n in range(2)))
    machines.write_text("machine,at_s,cpu_cores\na,0,20.5\nb,0,30\n")
    assert not [one for one in outcome("jobs", inputs=given).warnings if "whole cores" in one]


DEGENERATE: dict[str, tuple[str, dict[str, Any], list[tuple[int, int, int]], str]] = {
    "no-cores": ("jobs", {"machines": 1, "cpu_cores": 4}, [(0, 60, 1), (5, 60, 0)], "a job without cores: job-1"),
    "no-cores-waiting": ("waiting", {"machines": 1, "cpu_cores": 4}, [(0, 60, 0)], "a job without cores: job-0"),
    "one-instant": ("jobs", {"machines": 1, "cpu_cores": 4, "capacity": "walk"}, [(0, 60, 1)] * 3, "cannot walk"),
    "gap": (
        "jobs",
        {"machines": 1, "cpu_cores": 4, "from_s": 1000.0, "to_s": 2000.0},
        [(0, 60, 1), (100_000, 60, 1)],
        "^from_s is 1000, but no job of the trace comes from then to 2000 s",
    ),
    "gap-intervals": (
        "intervals",
        {"machines": 1, "cpu_cores": 4, "days": 2, "from_s": 1000.0, "to_s": 2000.0},
        [(0, 60, 1), (100_000, 60, 1)],
        "^from_s is 1000, but no job of the trace comes from then to 2000 s",
    ),
    "no-work": ("intervals", {"days": 1}, [(0, 0, 1), (9, 0, 1)], "no job that fits on a machine and runs at all"),
}


@pytest.mark.parametrize(("model", "given", "jobs", "why"), DEGENERATE.values(), ids=DEGENERATE)
def test_a_trace_from_which_no_run_can_be_made_is_refused_before_the_first_one(
    model: str, given: dict[str, Any], jobs: list[tuple[int, int, int]], why: str, tmp_path: Path
) -> None:
    found = model_named(model)
    settings = found.settings({**given, "inputs": {"jobs": Input(trace(tmp_path, jobs=jobs))}})
    with pytest.raises(InvalidParameter, match=why):
        found.prepare([settings], lambda share: None)


@pytest.mark.parametrize(
    ("model", "field"),
    [(model, field) for model in ("jobs", "waiting", "intervals") for field in ("cpu_cores", "task_runtime_s")]
    # In the model intervals memory does not count.
    + [("jobs", "memory_mib"), ("waiting", "memory_mib")],
)
def test_a_number_of_a_job_that_no_run_takes_is_refused_before_the_first_one(
    model: str, field: str, tmp_path: Path
) -> None:
    row = {"id": "a", "submit_s": 0, "runtime_s": 60, "cpu_cores": 1, "memory_mib": 1, "task_runtime_s": 60}
    row |= {field: 2e12} | ({"runtime_s": 2e12} if field == "task_runtime_s" else {})
    path = tmp_path / "jobs.csv"
    path.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
    found = model_named(model)
    given = {"machines": 1, "cpu_cores": 4} | ({"days": 1} if model == "intervals" else {})
    settings = found.settings({**given, "inputs": {"jobs": Input(path)}})
    why = rf"^inputs\.jobs has a {field} that must be a number from 0 to below 1\.1e\+12, but is 2e\+12"
    with pytest.raises(InvalidParameter, match=why):
        found.prepare([settings], lambda share: None)
    if field == "memory_mib" and model == "jobs":
        found.prepare([found.settings({**given, "memory": False, "inputs": {"jobs": Input(path)}})], lambda share: None)


@pytest.mark.parametrize("field", ["cpu_cores", "memory_mib"])
def test_a_number_of_a_machine_that_no_run_takes_is_refused_before_the_first_one(field: str, tmp_path: Path) -> None:
    path = tmp_path / "machines.csv"
    row = {"machine": "a", "at_s": 0, "cpu_cores": 8, "memory_mib": 1000, field: 2e12}
    path.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
    with pytest.raises(
        InvalidParameter, match=rf"^inputs\.capacity has a {field} that must be a number from 0 to below"
    ):
        supplied(Input(path), 0.0, 100.0)


def test_jobs_of_several_tasks_do_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("id,submit_s,runtime_s,cpu_cores,task_runtime_s\na,0,60,1,60;60\n")
    found = model_named("waiting")
    settings = found.settings({"machines": 1, "cpu_cores": 4, "inputs": {"jobs": Input(path)}})
    with pytest.raises(InvalidParameter, match=r"inputs\.jobs has jobs of several tasks"):
        found.prepare([settings], lambda share: None)


def test_memory_that_no_machine_has_is_said_and_what_is_left_waiting_too(tmp_path: Path) -> None:
    """Job c finds its memory on machine b and its cores on machine a only: it waits, and nobody knew."""
    path = tmp_path / "jobs.csv"
    path.write_text(
        "id,submit_s,runtime_s,cpu_cores,memory_mib,task_runtime_s\n"
        "a,0,60,1,9000,60\nb,1,60,1,100,60\nc,2,60,4,3000,60\n"
    )
    given: dict[str, Any] = {"machines": 1, "cpu_cores": 4, "memory_mib": 8192}
    found = outcome("jobs", **given, inputs={"jobs": Input(path)})
    assert (found.metrics["jobs_refused"], found.metrics["jobs_done"]) == (1, 2)
    assert found.warnings == (
        "1 of 3 jobs want more cores than the 4 of the largest machine, or more memory than the 8192 MiB of any, and "
        "are left out, with 16.7% of the work",
    )
    machines = tmp_path / "machines.csv"
    machines.write_text("machine,at_s,cpu_cores,memory_mib\na,0,8,1000\nb,0,2,4000\n")
    found = outcome("jobs", inputs={"jobs": Input(path), "capacity": Input(machines)})
    assert (found.metrics["jobs_refused"], found.metrics["jobs_left"], found.metrics["jobs_done"]) == (1, 1, 1)
    assert "the 4000 MiB of any" in found.warnings[0]
    assert found.warnings[1].startswith("1 of 2 jobs are not done: ")
    assert outcome("jobs", **given, memory=False, inputs={"jobs": Input(path)}).metrics["jobs_done"] == 3


def test_a_capacity_trace_may_begin_before_the_jobs(tmp_path: Path) -> None:
    late = Input(capacity(tmp_path, 77.0))
    whole = list(since(Trace(late.path, from_first=True), 600.0))  # type: ignore[arg-type]
    rows = [(row["machine"], row["at_s"], row["cpu_cores"]) for batch in whole for row in batch.rows()]
    assert rows == [("a", 0.0, 0.0), ("b", 0.0, 4.0), ("a", 300.0, 8.0), ("b", 4400.0, 8.0)]
    found = supplied(late, 600.0, 5400.0)
    assert (found.most_cores, found.last_s) == (8, 4400.0)
    assert found.mean_cores == pytest.approx((4 * 300 + 12 * 4100 + 16 * 1000) / 5400)
    given: dict[str, Any] = {"inputs": {"jobs": Input(trace(tmp_path)), "capacity": late}}
    assert outcome("jobs", **given).metrics["kills"] > 0
    assert outcome("jobs", **given, capacity_from_s=900.0).metrics["kills"] == 0
    with pytest.raises(InvalidParameter, match=r"capacity_from_s is 5001, .* comes at 5000 s"):
        outcome("jobs", **given, capacity_from_s=5001.0)


def test_facts_of_a_trace_are_found_once(tmp_path: Path) -> None:
    found = known(Input(trace(tmp_path, 50.0)), 4000.0)
    assert (found.jobs, found.last_s, found.core_s, found.early_core_s) == (4, 8000.0, WORK, 3600 * 4 + 600 * 2)
    assert found.mean_cores == pytest.approx((3600 * 4 + 600 * 2) / 4000)
    assert known(Input(trace(tmp_path, 50.0)), 4000.0, 16).core_s == WORK - 30 * 7200


COASTER = (
    "[experiment]\nname='c'\nmodel='coaster'\n{}\n[settings]\nservers=30\nshort_servers=4\nload=0.5\nhours=0.2\n{}"
)


def test_servers_may_be_an_axis_of_coaster_and_its_metrics_are_known_before_the_first_run(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(COASTER.format("", "[sweep]\nservers=[20, 40]\n"))
    found = run(path, output=tmp_path / "out", workers=0)
    assert found.columns["servers_on_demand"].tolist() == [18, 38]
    assert list(model_named("coaster").metrics) == list(found.metrics)  # type: ignore[attr-defined]
    for own, sweep, sentence in (
        ("", "[sweep]\nservers=[20]\n[[plots]]\nmetric='delay'\n", r"plots\[1\].metrics has 'delay', which the model"),
        ("metrics=['delay']", "", "experiment.metrics has 'delay', which the model does not give"),
    ):
        path.write_text(COASTER.format(own, sweep))
        with pytest.raises((ExperimentError, InvalidParameter), match=sentence):
            run(path, output=tmp_path / "none", workers=0)
        assert not (tmp_path / "none" / "runs").exists()


def test_an_axis_goes_before_a_setting(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(COASTER.format("", "node = { a = 1, b = 2 }\n[sweep]\nservers=[20, 40]\nnode.a=[3]\n"))
    experiment = document.read(path)
    assert [case.given["servers"] for case in experiment.cases()] == [20, 40]
    assert [case.given["node"] for case in experiment.cases()] == [{"a": 3, "b": 2}] * 2
    assert "servers" not in experiment.settings
    # Several values in place of one make an axis; a setting that is a list stays one.
    path.write_text(COASTER.format("", "sizes = [1, 2]\n"))
    experiment = document.read(path, {"servers": [20, 40], "load": {"from": 1, "to": 2, "step": 1}, "sizes": [3]})
    assert {axis.name: axis.values for axis in experiment.axes} == {"servers": (20, 40), "load": (1, 2)}
    assert experiment.settings["sizes"] == [3]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("jobs-walk", {"from_s": 0, "to_s": 8000}),
        ("intervals", {"from_s": 0, "days": 1, "history_days": 5}),
        ("waiting", {"from_s": 0, "machines": [2]}),
        ("coaster", {"servers": 40, "short_servers": 4, "cost_ratio": [2]}),
    ],
)
def test_shipped_experiments_that_make_their_jobs_take_a_trace(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    found = run(
        ROOT / "experiments" / f"{name}.toml",
        output=tmp_path / "out",
        overrides={"seeds": 1, **changes},
        inputs={"jobs": trace(tmp_path, 864_000.0)},
        workers=0,
    )
    assert not any(found.columns["error"])
    assert "load" not in found.axes
    assert found.meta["warnings"][0].startswith("the input jobs stands in place of what the file makes: without ")
    assert "load" in found.meta["warnings"][0]
    report = (tmp_path / "out" / "report.html").read_text()
    assert "the input jobs stands in place" in report


def test_a_shipped_experiment_takes_a_capacity_series(tmp_path: Path) -> None:
    inputs = {"jobs": trace(tmp_path), "capacity": capacity(tmp_path)}
    shipped = ROOT / "experiments" / "jobs-capacity.toml"
    found = run(shipped, output=tmp_path / "out", inputs=inputs, workers=0)
    assert found.columns["jobs_done"].tolist() == [3] * 6
    walk = run(
        ROOT / "experiments" / "jobs-walk.toml",
        output=tmp_path / "walk",
        overrides={"seeds": 1, "days": 1, "from_s": 0, "load": [0.4], "checkpoint_every_s": [0]},
        inputs={"capacity": inputs["capacity"]},
        workers=0,
    )
    assert np.isfinite(walk.columns["goodput"]).all()


def ebb(*words: str) -> Any:
    return CliRunner().invoke(main.app, ["sim", *words])


def test_rows_of_jobs_are_written_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = str(ROOT / "experiments" / "jobs-capacity.toml")
    words = ["--input", f"jobs={trace(tmp_path)}", "--input", f"capacity={capacity(tmp_path)}", "--workers", "1"]
    done = ebb("run", shipped, *words, "--rows", "jobs.parquet")
    assert done.exit_code == 0, done.output
    assert "warning: 1 of 4 jobs want more cores" in done.stderr
    rows = [row for row in pq.read_table("jobs.parquet").to_pylist() if row["policy"] == "first-fit"]
    head = [row for row in rows if row["requeue"] == "head"]
    # The first two are killed when machine a goes at 500 s; the third finds no machine and is no row.
    assert [(row["job"], row["id"], row["started_s"], row["ended_s"], row["kills"]) for row in head] == [
        (0, "job-0", 0.0, 4100.0, 1),
        (1, "job-1", 300.0, 1500.0, 1),
        (3, "job-3", 8000.0, 8600.0, 0),
    ]
    assert ebb("run", shipped, *words, "--rows", "jobs.csv").exit_code == 2


@pytest.mark.parametrize("name", ["harvest-series", "preemption"])
def test_a_model_without_jobs_has_no_rows_of_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = str(ROOT / "experiments" / f"{name}.toml")
    done = ebb("run", shipped, "--rows", "jobs.parquet")
    assert done.exit_code == 1
    sentence = f"settings.rows (--rows) asks for a row for each job, and the model {name} has no jobs; those of jobs, "
    assert sentence in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", sorted(ON_TRACES))
def test_every_model_of_jobs_gives_rows(model: str, tmp_path: Path) -> None:
    given = ON_TRACES[model] | {"inputs": {"jobs": Input(trace(tmp_path))}, "rows": True}
    found = outcome(model, **given)
    assert tuple(found.metrics) == model_named(model).metrics  # type: ignore[attr-defined]
    table = found.tables["jobs"]
    assert table["id"].tolist()[:2] == ["job-0", "job-1"]
    assert (table["ended_s"] > table["submitted_s"]).all()
    assert "jobs" not in outcome(model, **given | {"rows": False}).tables


def test_warnings_are_kept_with_the_runs(tmp_path: Path) -> None:
    inputs = {"jobs": trace(tmp_path), "capacity": capacity(tmp_path)}

    def said() -> Results:
        return run(ROOT / "experiments" / "jobs-capacity.toml", output=tmp_path / "out", inputs=inputs, workers=0)

    first, again = said(), said()
    assert again.meta["runs"]["kept"] == 6
    assert first.meta["warnings"] == again.meta["warnings"]
    assert len(first.meta["warnings"]) == 2
    assert all("6 runs" in warning for warning in first.meta["warnings"])


SWF = "1 100 0 3600 4 -1 -1 4 4000 -1 1 1 1 1 1 1 -1 -1"


def test_swf_with_more_columns_is_read_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "long.swf"
    lines = [SWF.replace("1 ", f"{i} ", 1) for i in range(1, 40)]
    for extra in ([" 7 2.5 x"] * 39, [" 7"] * 20 + [""] * 19):
        path.write_text("; with columns of its own\n" + "".join(f"{a}{b}\n" for a, b in zip(lines, extra, strict=True)))
        for fast in (True, False):
            log = Trace(path, fast=fast)
            assert log.form.name == "swf"
            assert sum(len(batch) for batch in log) == 39
            assert log.report.longer == sum(bool(one) for one in extra)
            assert log.report.malformed == 0
    done = ebb("inputs", str(path))
    assert any(line.startswith("with more columns, not read") and "20" in line for line in done.output.splitlines())
    path.write_text("\n".join([*lines, SWF.rsplit(" ", 1)[0]]) + "\n")
    log = Trace(path, "swf", max_malformed=1)
    assert sum(len(batch) for batch in log) == 39
    assert math.isclose(log.report.malformed, 1)

"""The model `deflation-cluster`: settings by name, runs that are the same again, the experiments of Fig. 8c and 8d."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.cluster.model import MODEL
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments.document import read
from ebbtide.simulator.experiments.model import Input, Outcome, checked

ROOT = Path(__file__).resolve().parents[3]
HEADER = "arrival_s,batch,cores,mem_gb,dur_lo_s,dur_hi_s,censored,dur_s\n"


def silent(_: float) -> None:
    """Progress that is not shown."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Input:
    """Two days of VMs in the derived form of Azure's trace, on its grid of 300 s."""
    rng = np.random.default_rng(7)
    lines = []
    for place in range(576):
        for number in range(int(rng.poisson(3))):
            cores = int(rng.choice([1, 2, 4, 8]))
            for _ in range(int(rng.integers(1, 4))):
                stay_s = int(rng.choice([300, 3600, 20_000, 90_000]))
                lines.append(f"{1_800_000 + place * 300},{number},{cores},{cores * 1.75},0,0,0,{stay_s}\n")
    path = tmp_path_factory.mktemp("trace") / "vms.csv"
    path.write_text(HEADER + "".join(lines), encoding="utf-8")
    return Input(path, "azure-derived")


def run(trace: Input, seed: int = 1, **given: Any) -> Outcome:
    base = {"overcommitment": 1.6, "window_from_s": 86_400, "window_until_s": 172_800, "grid_s": 300, "validate": True}
    settings = MODEL.settings({"inputs": {"vms": trace}} | base | given)
    return checked(MODEL.run(settings, seed, MODEL.prepare([settings], silent), silent))


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def test_deflation_preempts_less_than_preemption_only_and_hosts_more(trace: Input) -> None:
    deflated, stopped = (
        run(trace, policy=policy, low_share=0.6, minimum_share=0.3).metrics
        for policy in ("deflation", "preemption_only")
    )
    assert deflated["low_preempted_share"] < stopped["low_preempted_share"] / 2
    assert deflated["hosted_overcommitment"] > stopped["hosted_overcommitment"]
    assert 0 < deflated["low_throughput"] < 1
    assert stopped["low_throughput"] == pytest.approx(1)
    assert deflated["offered_overcommitment"] == pytest.approx(1.6, rel=0.1)
    assert deflated["offered_peak_cores"] == stopped["offered_peak_cores"]


def test_the_same_seed_gives_the_same_figures_and_another_one_others(trace: Input) -> None:
    first, again, other = run(trace, 1), run(trace, 1), run(trace, 2)
    assert first.metrics == again.metrics
    assert tuple(first.metrics) == MODEL.metrics
    assert all((first.tables["nodes"][name] == again.tables["nodes"][name]).all() for name in first.tables["nodes"])
    assert first.metrics != other.metrics


@pytest.mark.parametrize("policy", ["no_overcommit", "memory_ballooning"])
def test_policies_that_never_preempt_have_no_victims(trace: Input, policy: str) -> None:
    metrics = run(trace, policy=policy).metrics
    assert metrics["low_preempted_share"] == 0
    if policy == "no_overcommit":
        assert metrics["low_rejected_share"] > 0
        assert metrics["hosted_overcommitment_peak"] <= 1
    else:
        # CPU that is sold more than once slows down high priority, too.
        assert metrics["high_throughput"] < 1
        assert metrics["hosted_overcommitment_peak"] > 1


def test_vms_of_a_piece_that_ends_before_the_window_need_not_stay_for_ever(trace: Input, tmp_path: Path) -> None:
    """Of those that came on the first day nobody saw the end of lifetimes of 90,000 s; the default keeps them."""
    header, *lines = trace.path.read_text(encoding="utf-8").splitlines()
    rows = [line.split(",") for line in lines]
    for row in rows:
        row[6] = "1" if int(row[0]) < 1_886_400 and row[7] == "90000" else "0"
    path = tmp_path / "pieces.csv"
    path.write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n", encoding="utf-8")
    pieces = Input(path, "azure-derived")
    stay, drawn, again = (run(pieces, followed_until_s=until_s, overcommitment=1.6) for until_s in (0, 86_400, 86_400))
    assert drawn.metrics == again.metrics
    assert drawn.metrics["offered_peak_cores"] < stay.metrics["offered_peak_cores"]


def test_tables_say_what_each_node_hosted_and_each_day_asked_for(trace: Input) -> None:
    outcome = run(trace)
    nodes = outcome.tables["nodes"]["overcommitment"]
    assert len(nodes) == outcome.metrics["nodes"]
    assert nodes.mean() == pytest.approx(outcome.metrics["hosted_overcommitment"])
    assert outcome.tables["days"]["offered_overcommitment"].tolist() == pytest.approx(
        [outcome.metrics["offered_overcommitment_mean"]]
    )


def test_low_priority_vms_may_start_deflated(trace: Input) -> None:
    refused, started = (
        run(trace, start_deflated=flag, overcommitment=3, low_share=0.8, minimum_share=0.2).metrics
        for flag in (False, True)
    )
    assert refused["low_started_deflated"] == 0
    assert started["low_started_deflated"] > 0
    assert started["low_rejected_share"] < refused["low_rejected_share"]


def test_vms_that_fit_no_node_ask_for_none_and_are_warned_of(trace: Input, tmp_path: Path) -> None:
    """One in twenty wants 256 cores, one as much memory as no node has; without them there are as many nodes."""
    header, *lines = trace.path.read_text(encoding="utf-8").splitlines()
    wide = []
    for number, line in enumerate(lines):
        row = line.split(",")
        if number % 20 == 0:
            row[2:4] = ("256", "16") if number % 40 else ("2", "512")
        wide.append(",".join(row))
    outcomes = {}
    for name, rows in {"all": wide, "fitting": [row for n, row in enumerate(wide) if n % 20]}.items():
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
        outcomes[name] = run(Input(path, "azure-derived"), grid_s=0, low_share=0.0)
    assert outcomes["fitting"].warnings == outcomes["all"].warnings[1:]
    (said,) = (one for one in outcomes["all"].warnings if "fit no node" in one)
    assert "% of the core-seconds" in said
    metrics, fitting = outcomes["all"].metrics, outcomes["fitting"].metrics
    for name in ("nodes", "offered_peak_cores", "offered_overcommitment", "incompressible_cpu", "high_admitted"):
        assert metrics[name] == fitting[name]
    assert metrics["high_offered"] > fitting["high_offered"]


def test_a_vm_that_fits_a_node_only_at_its_minimum_counts_where_it_may_start_so(trace: Input) -> None:
    wide: dict[str, Any] = {"node_cpu_cores": 4, "low_share": 1.0, "minimum_share": 0.4, "overcommitment": 2}
    assert "fit no node" in run(trace, **wide).warnings[0]
    started = run(trace, start_deflated=True, **wide)
    assert not any("fit no node" in one for one in started.warnings)
    with pytest.raises(InvalidParameter, match="node_cpu_cores"):
        run(trace, **wide | {"node_memory_mib": 512})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "overcommitment"),
        ({"overcommitment": 0}, "overcommitment"),
        ({"overcommitment": 1.6, "low_share": 1.2}, "low_share"),
        ({"overcommitment": 1.6, "minimum_share": -0.1}, "minimum_share"),
        ({"overcommitment": 1.6, "policy": "kindness"}, "policy"),
        ({"overcommitment": 1.6, "placement": "worst-fit"}, "placement"),
        ({"overcommitment": 1.6, "sample_share": 0}, "sample_share"),
        ({"overcommitment": 1.6, "window_from_s": 9e9}, "window_from_s"),
        ({"overcommitment": 1.6, "followed_until_s": -1}, "followed_until_s"),
        ({"overcommitment": 1.6, "applications": ["doom"]}, "applications"),
        ({"overcommitment": 1.6, "overcommittment": 2}, "overcommittment"),
    ],
)
def test_settings_that_cannot_be_name_their_field(trace: Input, given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        MODEL.settings({"inputs": {"vms": trace}} | given)
    assert caught.value.field == field


def test_a_window_without_arrivals_is_an_error(trace: Input) -> None:
    with pytest.raises(InvalidParameter, match="window_from_s"):
        run(trace, window_from_s=4e7, window_until_s=5e7)


@pytest.mark.parametrize(("name", "runs"), [("fig8c", 6 * 5 * 6 * 10 * 2), ("fig8d", 6 * 3 * 10)])
def test_the_experiments_of_the_paper_are_read_with_all_their_cases(trace: Input, name: str, runs: int) -> None:
    experiment = read(ROOT / "experiments" / f"{name}.toml", inputs={"vms": trace.path})
    cases = experiment.cases()
    assert len(cases) * len(experiment.seeds) == runs
    for case in cases:
        settings = MODEL.settings(case.given)
        bound = MODEL.bounds(settings)["incompressible"]
        assert math.isfinite(bound)

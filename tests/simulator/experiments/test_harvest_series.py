"""The model "harvest-series", by a replay that is small enough to follow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.experiments import Outcome, run
from ebbtide.simulator.experiments.harvest_series import MODEL
from ebbtide.simulator.experiments.model import Input
from tests.simulator.experiments.places import put

DATA = Path(__file__).parents[1] / "data"

#: One server of 8 cores. Harvested: 8; from 100 s 6; 400 s 5; 1000 s 5.5 (floor: no change); 4600 s 7.5 (7).
VMS = """id,arrives_s,departs_s,cpu_cores,memory_mib
a,100,4600,2,10
b,400,1000,1,10
c,1000,,0.5,10
d,5000,5001,9,10
e,8200,,0.1,10
"""


def outcome(path: Path, seed: int = 1, **given: Any) -> Outcome:
    settings = MODEL.settings({"servers": 1, "cpu_cores": 8, "warm_up_s": 0, "inputs": {"vms": Input(path)}} | given)
    return MODEL.run(settings, seed, MODEL.prepare([settings], lambda share: None), lambda share: None)


def test_a_replay_by_hand(tmp_path: Path) -> None:
    # Times count from the first arrival: changes at 0 (2 down), 300 (1 down), 4500 (2 up). The beginning is none, and
    # the 9 cores of d have no room. The last arrival, at 8100 s, ends the series: 7.5 - 0.1 is still 7 cores.
    found = outcome(put(tmp_path, VMS, "vms.csv"))
    metrics = found.metrics
    assert tuple(metrics) == MODEL.metrics
    assert (metrics["placed"], metrics["rejected"], metrics["rejected_share"]) == (4, 1, 0.2)
    # The first change stands where the server begins: it begins with 6.
    assert (metrics["gap_mean_s"], metrics["gap_p50_s"], metrics["within_10_min"]) == (4200, 4200, 0)
    assert metrics["within_1_h"] == 0
    assert (metrics["change_mean_cores"], metrics["shrinks_share"]) == (1.5, 0.5)
    assert metrics["changes_per_server_day"] == pytest.approx(2 * 86400 / 8100)
    assert metrics["harvested_mean_cores"] == pytest.approx((6 * 300 + 5 * 4200 + 7 * 3600) / 8100)
    hours = found.tables["hours"]
    assert hours["from_s"].tolist() == [0, 3600, 7200]
    assert hours["harvested_mean_cores"].tolist() == pytest.approx(
        [(6 * 300 + 5 * 3300) / 3600, (5 * 900 + 7 * 2700) / 3600, 7]
    )
    gaps = found.tables["gaps"]
    assert dict(zip(gaps["upto_s"].tolist(), gaps["share"].tolist(), strict=True))[7200] == 1


def test_a_vm_that_the_trace_lost_sight_of_leaves_as_one_of_its_age_did(tmp_path: Path) -> None:
    # c, of half a core, came at 900 s and was followed until 2000 s; a is the only one that was seen for longer.
    metrics = outcome(put(tmp_path, VMS, "vms.csv"), followed_until_s=2000).metrics
    leaves_s = 900 + 4500
    mean = (6 * 300 + 5 * 4200 + 7 * (leaves_s - 4500) + 8 * (8100 - leaves_s)) / 8100
    assert metrics["harvested_mean_cores"] == pytest.approx(mean)


def test_what_happens_in_the_warm_up_counts_in_nothing_but_what_is_placed(tmp_path: Path) -> None:
    metrics = outcome(put(tmp_path, VMS, "vms.csv"), warm_up_s=400).metrics
    assert math.isnan(metrics["gap_mean_s"])
    assert (metrics["change_mean_cores"], metrics["shrinks_share"], metrics["placed"]) == (2, 0, 4)
    assert metrics["harvested_mean_cores"] == pytest.approx((5 * 4100 + 7 * 3600) / 7700)


def test_vms_without_memory_and_an_end_past_the_trace_are_warned_of(tmp_path: Path) -> None:
    path = put(tmp_path, VMS, "vms.csv")
    assert outcome(path).warnings == outcome(path, until_s=8100).warnings == ()
    assert outcome(path, until_s=9000).warnings == (
        "what is measured ends with the last VM of the trace, at 8100 s, not at 9000 s",
    )
    path = put(tmp_path, VMS.replace("4600,2,10", "4600,2,"), "some.csv")
    assert outcome(path).warnings == ("1 of 5 VMs say no memory, and are placed as if they wanted none",)


def test_a_series_ends_where_it_is_told_to(tmp_path: Path) -> None:
    metrics = outcome(put(tmp_path, VMS, "vms.csv"), until_s=1000).metrics
    assert metrics["harvested_mean_cores"] == pytest.approx((6 * 300 + 5 * 700) / 1000)
    assert metrics["placed"] == 3


def test_with_less_than_the_least_there_is_no_harvest_vm(tmp_path: Path) -> None:
    metrics = outcome(put(tmp_path, VMS, "vms.csv"), least_cpu_cores=5.2).metrics
    assert metrics["harvested_mean_cores"] == pytest.approx((6 * 300 + 5 * 3600 + 7 * 3600) / 8100)
    assert metrics["change_mean_cores"] == pytest.approx((6 + 5 + 2) / 3)


def test_a_share_keeps_whole_groups_and_differs_by_seed() -> None:
    path = DATA / "azure_derived.csv.gz"
    placed = {
        seed: outcome(path, seed, cpu_cores=1000, memory_mib=1e7, share=0.5).metrics["placed"] for seed in range(8)
    }
    assert len(set(placed.values())) > 1
    assert all(0 < count < 48 for count in placed.values())
    assert outcome(path, 3, cpu_cores=1000, memory_mib=1e7, share=0.5).metrics["placed"] == placed[3]


def test_the_grid_of_a_trace_is_left_by_the_seed() -> None:
    path = DATA / "azure_derived.csv.gz"
    one, two, other = (outcome(path, seed, cpu_cores=64, grid_s=300) for seed in (1, 1, 2))
    assert one.metrics == pytest.approx(two.metrics, nan_ok=True)
    assert one.metrics["gap_p50_s"] != other.metrics["gap_p50_s"]


def test_generated_vms_leave_what_littles_law_says(tmp_path: Path) -> None:
    text = """
    [experiment]
    name = "a"
    model = "harvest-series"
    policies = ["packing", "balancing", "random"]
    seeds = 2
    [settings]
    servers = 20
    arrivals_per_h = 60
    lifetime_most_s = 43200
    warm_up_s = 43200
    until_s = 259200
    """
    found = run(put(tmp_path, text), output=tmp_path / "out", workers=0)
    assert found.columns["rejected"].sum() == 0
    for policy in found.values("policy"):
        mean = found.mean("harvested_mean_cores", {"policy": policy}).mean
        assert mean == pytest.approx(found.columns["bound_unallocated_mean_cores"][0], abs=1.0)
    # Packing fills whole servers, so their harvest VMs see fewer and larger steps of the same VMs.
    assert found.mean("shrinks_share").mean == pytest.approx(0.5, abs=0.05)
    assert np.isfinite(found.columns["gap_mean_s"]).all()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "servers is missing"),
        ({"servers": 1.5}, "servers must be a whole number, but is 1.5"),
        (
            {"servers": 1, "policy": "best"},
            "policy must be one of packing, balancing, random, fullest-of, but is 'best'",
        ),
        ({"servers": 1, "warm_up_s": 9e9}, "warm_up_s must be below until_s"),
        ({"servers": 1, "share": 0}, "share must be above 0 and at most 1, but is 0"),
        ({"servers": 1, "servants": 1}, "servants is unknown; allowed are inputs, policy, servers, "),
        ({"servers": 1, "inputs": {"jobs": Input(DATA)}}, "inputs.jobs is unknown; allowed are vms"),
        (
            {"servers": 1, "arrivals_per_h": 3, "inputs": {"vms": Input(DATA / "azure_derived.csv.gz")}},
            "arrivals_per_h is for generated VMs",
        ),
        ({"servers": 1, "lifetime_least_s": 1e9}, "lifetime_most_s must be above lifetime_least_s, but is 259200"),
        ({"servers": 1, "lifetime_least_s": 1e-20}, "lifetime_least_s must be at least 1e-15 of lifetime_most_s"),
        ({"servers": 1, "lifetime_shape": 0}, "lifetime_shape must be above 0, but is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        MODEL.settings(given)
    assert str(caught.value).startswith(sentence)


def test_a_trace_of_something_else_is_refused() -> None:
    with pytest.raises(
        InvalidParameter, match=r"inputs.vms must be a trace of vms, but .*gaia_azure.csv is one of jobs"
    ):
        outcome(DATA / "gaia_azure.csv")

"""The decision of a Spark cluster: Eq. 1 to 3 of Sharma et al. 2019, the paper's examples, curves, progress, slots."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app_adapters.errors import ApplicationError
from app_adapters.spark import progress
from app_adapters.spark.curves import LINEAR, Curve, Curves, read_curves
from app_adapters.spark.policy import SELF, VM_LEVEL, Deflation, Job, decide, time_self, time_vm_level
from app_adapters.spark.slots import Nominal, lost, slots

shares = st.floats(0, 0.95)


def alike(share: float, vms: int = 8) -> dict[str, Deflation]:
    return {f"vm-{i}": Deflation(share, share) for i in range(vms)}


# --- the equations ----------------------------------------------------------------------------------------------------


def test_the_equations_by_hand() -> None:
    vector = [Deflation(0.5, 0.5), Deflation(0.0, 0.0)]
    assert time_vm_level(0.5, vector) == pytest.approx(0.5 + 0.5 / 0.5)
    assert time_self(0.5, 0.4, vector) == pytest.approx(0.5 + (0.4 * 0.5 + 0.5) / 0.75)
    assert time_vm_level(1.0, vector) == 1.0
    assert time_vm_level(0.5, [Deflation(1.0, 1.0)]) == math.inf


def test_the_papers_als_is_deflated_at_the_vm_level() -> None:
    """Fig. 6a: all VMs at 50 %, half way: 1.5 against 2.2, which is r = 0.7."""
    decision = decide(alike(0.5), [Job("ALS", 0.5, 0.7)])
    assert decision.choice == VM_LEVEL
    assert decision.vm_time == pytest.approx(1.5)
    assert decision.self_time == pytest.approx(2.2)
    assert "T_self 2.20 > T_VM 1.50" in decision.reason
    assert "8 of 8 VMs deflated" in decision.reason


def test_the_papers_k_means_deflates_itself() -> None:
    """Fig. 6b: 1.18 and 1.38 at 25 and 50 % by itself, which the linear model cannot say; its curves can."""
    curves = Curves(Curve(((0.25, 0.7), (0.5, 0.5))), Curve(((0.25, 0.735), (0.5, 0.568))))
    for share, measured in ((0.25, 1.18), (0.5, 1.38)):
        decision = decide(alike(share), [Job("K-means", 0.5, 0.0)], curves)
        assert decision.choice == SELF
        assert decision.self_time == pytest.approx(measured, abs=0.01)
    assert decide(alike(0.5), [Job("K-means", 0.5, 0.0)], LINEAR).self_time == pytest.approx(1.5)


def test_one_straggler_is_worse_than_fewer_slots() -> None:
    one = {**alike(0.0), "vm-0": Deflation(0.5, 0.5)}
    assert decide(one, [Job("K-means", 0.5, 0.05)]).choice == SELF
    assert decide(one, [Job("K-means", 0.99, 1.0)]).choice == VM_LEVEL  # nearly done: too much to lose


def test_stages_of_several_waves_do_not_wait_for_the_slowest_vm_alone() -> None:
    """Two VMs of 4 slots, one at half speed, 16 tasks: by 2 the fast one has done 8, and takes the last 4 then.

    All is done at 3, where the equation says 4.
    """
    vector = [Deflation(0.5, 0.5, 4), Deflation(0.0, 0.0, 4)]
    assert time_vm_level(0.5, vector, waves=2.0) == pytest.approx(0.5 + 0.5 * 3 / 2)
    assert time_vm_level(0.5, vector, waves=1.0) == pytest.approx(0.5 + 0.5 * 2)
    # Very many small tasks: as fast as the slots are together.
    assert time_vm_level(0.0, vector, waves=60.0) == pytest.approx(1 / 0.75, rel=0.02)


@given(st.lists(shares, min_size=1, max_size=9), st.floats(1, 70), st.integers(1, 8))
def test_waves_lie_between_the_mean_of_the_vms_and_the_slowest(given_: list[float], waves: float, cores: int) -> None:
    vector = [Deflation(share, share, cores) for share in given_]
    lefts = [1 - share for share in given_]
    time = time_vm_level(0.0, vector, waves=waves)
    assert time <= 1 / min(lefts) + 1e-9
    # A last wave that is not full lets an undeflated stage idle, too.
    assert time >= waves / math.ceil(waves) / (sum(lefts) / len(lefts)) * 0.999 - 1e-9 or waves > 64


@given(shares, st.floats(0, 1), st.floats(0.001, 1))
def test_where_all_vms_lose_alike_and_anything_is_lost_the_vm_level_is_never_worse(
    share: float, c: float, r: float
) -> None:
    vector = tuple(alike(share).values())
    assert time_vm_level(c, vector) <= time_self(c, r, vector) + 1e-9


@given(st.lists(st.tuples(shares, shares), min_size=1, max_size=9), st.floats(0, 1), st.floats(0, 1))
def test_the_choice_is_always_the_shorter_time(given_: list[tuple[float, float]], c: float, r: float) -> None:
    vector = {f"vm-{i}": Deflation(vm, own) for i, (vm, own) in enumerate(given_)}
    decision = decide(vector, [Job("j", c, r)])
    assert (decision.choice == SELF) == (decision.self_time < decision.vm_time)
    assert decision.vm_time >= 1 - 1e-9
    assert decision.self_time >= 1 - 1e-9


@given(shares, shares, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_more_deflation_never_shortens(low: float, high: float, c: float, r: float, more_r: float) -> None:
    low, high = sorted((low, high))
    less, more = tuple(alike(low).values()), tuple(alike(high).values())
    assert time_vm_level(c, less) <= time_vm_level(c, more) + 1e-9
    assert time_self(c, r, less) <= time_self(c, r, more) + 1e-9
    assert time_self(c, min(r, more_r), less) <= time_self(c, max(r, more_r), less) + 1e-9


def test_no_application_costs_nothing_and_is_self() -> None:
    decision = decide(alike(0.5), [])
    assert decision.choice == SELF
    assert "no application is running" in decision.reason


def test_of_several_applications_the_one_with_more_cores_counts_more() -> None:
    one = {**alike(0.0), "vm-0": Deflation(0.5, 0.5)}
    shuffler, iterator = Job("als", 0.9, 1.0), Job("k", 0.1, 0.0)
    assert decide(one, [shuffler]).choice == VM_LEVEL
    assert decide(one, [iterator]).choice == SELF
    big = Job("k", 0.1, 0.0, cores=30)
    assert decide(one, [shuffler, big]).choice == SELF
    assert decide(one, [Job("als", 0.9, 1.0, cores=30), iterator]).choice == VM_LEVEL


# --- curves -----------------------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points_and_ends_at_nothing(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    path.write_text('{"vm": {"0.5": 0.6, "0.25": 0.9}}')
    curves = read_curves(str(path))
    assert [curves.vm.at(d) for d in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx([1, 0.9, 0.6, 0.3, 0])
    assert curves.self_deflated.at(0.3) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "object"),
        ("{", "cannot be read"),
        ('{"em": {}}', "nothing else"),
        ('{"vm": {"1.5": 0.5}}', "no deflation"),
        ('{"vm": {"nan": 0.5}}', "no deflation"),
        ('{"vm": {"0.5": 1.5}}', "throughput"),
        ('{"vm": {"0.5": true}}', "throughput"),
        ('{"self": {"0.25": 0.5, "0.5": 0.6}}', "must not grow"),
        ('{"self": {"0.5": 0.5, "0.50": 0.5}}', "twice"),
    ],
)
def test_a_bad_table_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "curves.json"
    path.write_text(text)
    with pytest.raises(ApplicationError, match=problem):
        read_curves(str(path))


# --- progress and recomputation ---------------------------------------------------------------------------------------


def row(number: int, status: str = "COMPLETE", **more: Any) -> dict[str, Any]:
    times = {"submissionTime": f"2026-01-01T00:00:{number:02}.000GMT"} if status != "PENDING" else {}
    if status == "COMPLETE":
        times["completionTime"] = f"2026-01-01T00:00:{number + 1:02}.000GMT"
    return {"stageId": number, "name": f"line {number}", "status": status, "numTasks": 4, **times, **more}


MIB = 1024 * 1024
NOW_S = 1767225600.0 + 4


def test_progress_is_the_share_of_stages_and_of_the_tasks_of_those_under_way() -> None:
    rows = [row(3, "PENDING"), row(2, "ACTIVE", numCompleteTasks=2), row(1), row(0), row(9, "SKIPPED")]
    found = progress.stages(json.loads(json.dumps(rows)))
    assert progress.progress(found) == pytest.approx(2.5 / 4)
    assert progress.progress(found, expected=10) == pytest.approx(0.25)
    assert progress.progress([]) == 0.0


def test_a_stage_that_is_tried_again_counts_once() -> None:
    found = progress.stages([row(0, "ACTIVE", attemptId=1), row(0, "FAILED", numCompleteTasks=4)])
    assert progress.progress(found) == 0.0


def test_recomputation_is_the_time_of_stages_that_read_data_from_all_others() -> None:
    found = progress.stages([row(0, inputBytes=9 * MIB), row(1, shuffleReadBytes=5 * MIB), row(2), row(3)])
    assert progress.recomputed(found, NOW_S) == pytest.approx(0.25)
    light = progress.stages([row(0, inputBytes=90 * MIB, shuffleWriteBytes=1000), row(1, shuffleReadBytes=1000)])
    assert progress.recomputed(light, NOW_S) == 0.0


def test_a_shuffle_of_data_that_is_about_to_happen_means_all_of_it_again() -> None:
    shuffles = row(1, "ACTIVE", inputBytes=MIB, shuffleWriteBytes=MIB)
    assert progress.recomputed(progress.stages([shuffles, row(0)]), NOW_S) == 1.0
    earlier = row(0, inputBytes=MIB, shuffleWriteBytes=MIB, name="same")
    just_begun = row(1, "ACTIVE", name="same")
    assert progress.recomputed(progress.stages([just_begun, earlier]), NOW_S) == 1.0
    assert progress.recomputed(progress.stages([row(1, "ACTIVE"), earlier]), NOW_S) == 0.0


@pytest.mark.parametrize(
    "rows",
    [
        {},
        [1],
        [{"status": 3}],
        [row(0, numTasks=-1)],
        [row(0, numTasks="4")],
        [row(0, numTasks=float("nan"))],
        [row(0, submissionTime="soon")],
        [row(0, submissionTime=7)],
    ],
)
def test_rows_that_spark_would_never_send_are_errors(rows: Any) -> None:
    with pytest.raises(ApplicationError):
        progress.stages(rows)


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        ({"cpu_cores": 4.0}, 4),
        ({"cpu_cores": 3.0}, 3),
        ({"cpu_cores": 2.9}, 2),
        ({"cpu_cores": 0.4}, 1),
        ({"cpu_cores": 0.0}, 0),
        ({"cpu_cores": 9.0}, 4),
        ({"cpu_cores": 2.0, "memory_mib": 1000.0}, 2),
        ({"memory_mib": 1000.0}, 4),
        ({"memory_mib": 900.0}, 3),
        ({"cpu_cores": 4.0, "memory_mib": 250.0}, 1),
        ({"cpu_cores": 4.0, "memory_mib": 249.0}, 0),
        ({"cpu_cores": 4.0, "memory_mib": 0.0}, 0),
    ],
)
def test_slots_are_whole_and_each_keeps_its_part_of_the_memory_or_goes(target: dict[str, float], kept: int) -> None:
    assert slots(target, Nominal(4, 1000.0)) == kept


def test_what_a_vm_loses_is_by_the_component_that_loses_most() -> None:
    nominal = Nominal(4, 1000.0)
    assert lost({"cpu_cores": 3.0, "memory_mib": 300.0}, 600.0, nominal) == pytest.approx(0.5)
    assert lost({"cpu_cores": 3.0, "memory_mib": 700.0}, 600.0, nominal) == pytest.approx(0.25)
    assert lost({"memory_mib": 700.0}, 0.0, nominal) == 0.0

"""VMs of a trace as columns and back; who has no group is on its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.generators.harvest import Packing
from ebbtide.simulator.generators.replayed import vm_batches, vm_columns
from ebbtide.simulator.inputs.batches import VmBatch, hints, texts, unknown
from ebbtide.simulator.inputs.traces import Trace
from ebbtide.simulator.matching.pools import PoolSettings, pool

DATA = Path(__file__).parent / "data"
DAY_S = 86_400.0


def vms(groups: list[str], step_s: float = 1.0, stay_s: float = 10.0) -> VmBatch:
    count = len(groups)
    arrives_s = np.arange(count, dtype=np.float64) * np.float64(step_s)
    return VmBatch(
        id=texts(f"vm-{i}" for i in range(count)),
        group=texts(groups),
        arrives_s=arrives_s,
        departs_s=arrives_s + stay_s,
        cpu_cores=np.ones(count),
        memory_mib=np.full(count, 1024.0),
        priority=hints(count),
        utilisation=unknown(count),
    )


def test_columns_come_back_as_batches_and_groups_stay_together() -> None:
    columns = vm_columns([vms(["b", "", "a"]), vms([]), vms(["b"])])
    assert (columns["group"][0], columns["group"][1]) == (columns["group"][3], -1)
    (found,) = vm_batches(columns, np.array([0, 1, 3]))
    assert found.arrives_s.tolist() == [0, 1, 0]
    assert (found.group[0], found.group[1]) == (found.group[2], "")
    assert list(vm_batches(columns, np.empty(0, np.int64))) == []
    with pytest.raises(InvalidParameter, match="vms must have VMs"):
        vm_columns([vms([])])


def test_a_real_trace_comes_back_as_it_was() -> None:
    batches = [b for b in Trace(DATA / "azure_derived.csv.gz", from_first=True) if isinstance(b, VmBatch)]
    columns = vm_columns(batches)
    whole = VmBatch.joined(batches)
    back = VmBatch.joined(list(vm_batches(columns, np.arange(len(whole)))))
    for name in ("arrives_s", "departs_s", "cpu_cores", "memory_mib"):
        np.testing.assert_array_equal(getattr(back, name), getattr(whole, name))
    assert len(set(zip(whole.group.tolist(), back.group.tolist(), strict=True))) == len(set(whole.group.tolist()))


def test_a_pool_takes_a_share_of_vms_that_have_no_group_one_by_one() -> None:
    """As one group they would all be taken, or none of them."""
    columns = vm_columns([vms([""] * 4000, step_s=100.0, stay_s=9000.0)])
    given = PoolSettings(
        Packing.BALANCING, 1, 0.5, cpu_cores=100.0, least_cpu_cores=0.0, grid_s=0.0, machines=1, from_s=DAY_S,
        until_s=4 * DAY_S,
    )  # fmt: skip
    for seed in range(3):
        found = pool(columns, given, seed)
        # Of 100 cores that 90 VMs at a time would hold, half are taken.
        assert found.mean_cores(DAY_S, 4 * DAY_S) == pytest.approx(55.0, abs=3.0)


@pytest.mark.parametrize(("followed_until_s", "cores"), [(0.0, 264.0), (DAY_S, 364.0)])
def test_vms_that_a_trace_lost_sight_of_leave_a_pool_as_others_of_their_age_did(
    followed_until_s: float, cores: float
) -> None:
    """Of 400 cores 100 VMs take one each that nobody saw depart; those of every hour after them stay for 36 hours."""
    lost, hourly = vms(["lost"] * 100), vms(["seen"] * 110, 3600.0, 1.5 * DAY_S)
    seen = replace(hourly, arrives_s=hourly.arrives_s + 3600.0, departs_s=hourly.departs_s + 3600.0)
    columns = vm_columns([replace(lost, departs_s=np.full(100, np.nan)), seen])
    given = PoolSettings(
        Packing.BALANCING, 1, 1.0, cpu_cores=400.0, least_cpu_cores=0.0, grid_s=0.0, machines=1, from_s=DAY_S,
        until_s=4 * DAY_S, followed_until_s=followed_until_s,
    )  # fmt: skip
    for draw in (0, 1):
        found = pool(columns, given, 1, draw=draw)
        assert found.mean_cores(2 * DAY_S, 4 * DAY_S) == pytest.approx(cores, abs=2.0)

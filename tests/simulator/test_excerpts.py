"""Excerpts of real traces, with sums that were taken from the files by other means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ebbtide.simulator.inputs.batches import Batch, CapacityBatch, JobBatch, SeriesBatch, VmBatch
from ebbtide.simulator.inputs.traces import Trace

DATA = Path(__file__).parent / "data"


def read(name: str) -> tuple[Batch, Trace]:
    trace = Trace(DATA / name)
    batches = list(trace)
    return type(batches[0]).joined(batches), trace


def test_azure_v1_on_its_grid() -> None:
    vms, trace = read("azure_derived.csv.gz")
    assert isinstance(vms, VmBatch)
    assert (trace.form.name, len(vms), trace.report.lines) == ("azure-derived", 48, 49)
    assert vms.cpu_cores.sum() == 90
    assert vms.memory_mib.sum() == 160256
    assert np.isnan(vms.departs_s).sum() == 8
    assert vms.arrives_s.sum() == 86400900
    assert np.nansum(vms.departs_s - vms.arrives_s) == 136950
    assert len(set(vms.group)) == 15
    (early,) = Trace(DATA / "azure_derived.csv.gz", options={"censored": "leave"})
    assert isinstance(early, VmBatch)
    assert (early.departs_s - early.arrives_s)[np.isnan(vms.departs_s)].tolist() == [302550] * 8


def test_gaia() -> None:
    jobs, trace = read("gaia_azure.csv")
    assert isinstance(jobs, JobBatch)
    assert (trace.form.name, len(jobs)) == ("gaia", 60)
    assert jobs.runtime_s.sum() == pytest.approx(3_468_900)
    assert jobs.cpu_cores.sum() == 220


def test_surf() -> None:
    jobs, trace = read("surf.parquet")
    assert isinstance(jobs, JobBatch)
    assert (trace.form.name, len(jobs)) == ("opendc-tasks", 80)
    assert jobs.runtime_s.sum() == 118147
    assert (jobs.submit_s[0], jobs.submit_s[-1]) == (0, 30324)
    assert set(jobs.cpu_cores) == {16}
    assert list(jobs.id[:3]) == ["2081278", "2081285", "2081310"]


def test_carbon() -> None:
    series, trace = read("carbon_miso.csv")
    assert isinstance(series, SeriesBatch)
    assert (len(series), trace.report.origin) == (48, "2021-01-01T00:00:00+00:00")
    assert series.value.sum() == pytest.approx(25350.14)
    assert np.diff(series.at_s).tolist() == [3600] * 47
    (lifecycle,) = Trace(DATA / "carbon_miso.csv", options={"intensity": "lifecycle"})
    assert isinstance(lifecycle, SeriesBatch)
    assert lifecycle.value.sum() == pytest.approx(28431.82)


def test_spot_nodes() -> None:
    changes, trace = read("bamboo_g4dn.csv")
    assert isinstance(changes, CapacityBatch)
    assert (trace.form.name, len(changes), changes.cpu_cores.sum()) == ("spot-nodes", 60, 34)
    assert (changes.at_s[0], changes.machine[0], changes.at_s[-1]) == (480, "node1", 11520)


def test_spot_polls_that_two_pollers_wrote_are_put_in_order() -> None:
    series, trace = read("bamboo_v100.txt")
    assert isinstance(series, SeriesBatch)
    assert (len(series), series.value.sum()) == (60, 4095)
    assert trace.report.reordered > 0
    assert (np.diff(series.at_s) >= 0).all()
    assert series.at_s[-1] == 71 * 60 + 14

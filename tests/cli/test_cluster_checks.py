"""What the cluster's script checks, with figures by hand: each check must be able to fail."""

from __future__ import annotations

import pytest

from deflation.ledger import Layer
from deflation.messages import LedgerRow, Vector
from deflation.pages import Event
from ebb.demo import cluster_checks as checks
from ebb.demo.report import Deflation
from ebb.readings import Reading


def row(layer: Layer, resource: str, verified: float) -> LedgerRow:
    return LedgerRow(
        layer=layer, resource=resource, asked=verified, promised=verified, verified=verified, seconds=1, reason=""
    )


#: What the application relinquished came back through the guest: it is not counted twice.
LEDGER = (
    row(Layer.APPLICATION, "memory_mib", 90),
    row(Layer.GUEST, "memory_mib", 128),
    row(Layer.HYPERVISOR, "memory_mib", 96),
    row(Layer.GUEST, "cpu_cores", 1),
)


def deflation(after: Vector) -> Deflation:
    before = Vector(cpu_cores=2, memory_mib=768)
    return Deflation(vm="low-1", cause="high-1", ledger=LEDGER, before=before, after=after)


RIGHT = deflation(Vector(cpu_cores=1, memory_mib=544))
WRONG = deflation(Vector(cpu_cores=1, memory_mib=600))


def event(sentence: str, kind: str = "preempting") -> Event:
    return Event(id=1, at=1.0, kind=kind, sentence=sentence)


def test_a_ledger_must_be_the_fall_of_its_bound() -> None:
    assert checks.adds_up(RIGHT).ok
    assert not checks.adds_up(WRONG).ok
    assert "ledger 224, bound fell by 168 memory_mib" in checks.adds_up(WRONG).detail


def test_all_ledgers_together_must_be_the_fall_of_all_bounds() -> None:
    assert checks.sums_agree([RIGHT, RIGHT]).ok
    assert not checks.sums_agree([RIGHT, WRONG]).ok
    assert not checks.sums_agree([]).ok


def test_a_preemption_for_a_minimum_is_told() -> None:
    assert checks.nobody_for_a_minimum([event("preempting low-1 (reason shortfall): x")]).ok
    assert not checks.nobody_for_a_minimum([event("preempting low-1 (reason minimum): x")]).ok


def test_a_shortfall_must_happen_and_name_its_layer() -> None:
    named = event("preempting low-3 (reason shortfall): deflation fell short of 8 MiB in layer guest (busy) for high-4")
    unnamed = event("preempting low-3 (reason shortfall): deflation fell short of 8 MiB for high-4")
    assert checks.shortfalls_name_a_layer([named]).ok
    assert not checks.shortfalls_name_a_layer([named, unnamed]).ok
    assert not checks.shortfalls_name_a_layer([]).ok


@pytest.mark.parametrize(
    ("quotas", "online", "expected", "cores"),
    [
        ((0.5, 0.5), (0,), 0.5, 0.5),
        ((0.25, 0.25), (0,), 0.5, 0.5),
        ((None, None), (0, 1), 2.0, 2.0),
        ((None, None), (0, 1), 0.5, 2.0),
        ((0.4, 0.4), (0,), 0.5, 0.4),
    ],
)
def test_a_parked_vcpu_that_is_distrusted_counts(
    quotas: tuple[float | None, ...], online: tuple[int, ...], expected: float, cores: float
) -> None:
    reading = Reading(
        memcached_limit_mib=64,
        memcached_rss_mib=4,
        cpus_online=online,
        virtio_mem_current_mib=384,
        balloon_actual_mib=384,
        vcpu_quota_cores=quotas,
        resident_mib=100,
    )
    assert checks.cpu_bound(reading, expected) == pytest.approx(cores)

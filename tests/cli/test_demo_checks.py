"""What the demo checks, with figures by hand: each check must be able to fail."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.ledger import Layer
from ebbtide.demo import checks
from ebbtide.demo.cache import VALUE_BYTES
from ebbtide.demo.report import Readings, VMReport
from ebbtide.lab.guest_link import value_digest
from ebbtide.lab.readings import Reading
from ebbtide.messages.common import Vector
from ebbtide.messages.machines import CoreChange
from ebbtide.messages.operations import LedgerRow, VMOutcome

NOMINAL = Reading(
    memcached_limit_mib=563,
    memcached_rss_mib=340,
    cpus_online=(0, 1, 2),
    virtio_mem_current_mib=512,
    balloon_actual_mib=512,
    vcpu_quota_cores=(None, None, None),
    resident_mib=500,
)
DEFLATED = NOMINAL.model_copy(
    update={
        "memcached_limit_mib": 240,
        "memcached_rss_mib": 245,
        "cpus_online": (0, 1),
        "virtio_mem_current_mib": 0,
        "balloon_actual_mib": 384,
        "vcpu_quota_cores": (0.625, 0.625, 0.625),
        "resident_mib": 380,
    }
)


def row(layer: Layer, resource: str, asked: float, verified: float) -> LedgerRow:
    return LedgerRow(
        layer=layer, resource=resource, asked=asked, promised=verified, verified=verified, seconds=1, reason=""
    )


LEDGER = (
    row(Layer.APPLICATION, "cpu_cores", 1.75, 0),
    row(Layer.APPLICATION, "memory_mib", 640, 95),
    row(Layer.GUEST, "cpu_cores", 1.75, 1),
    row(Layer.GUEST, "memory_mib", 640, 512),
    row(Layer.HYPERVISOR, "cpu_cores", 0.75, 0.75),
    row(Layer.HYPERVISOR, "memory_mib", 128, 128),
)


def vm(ledger: tuple[LedgerRow, ...] = LEDGER, deflated: Reading = DEFLATED, restored: Reading = NOMINAL) -> VMReport:
    size = Vector(cpu_cores=3, memory_mib=1024)
    readings = Readings(before=NOMINAL, deflated=deflated, restored=restored)
    return VMReport(
        name="low-1",
        priority=Priority.DEFLATABLE,
        nominal=size,
        deflated=Vector(cpu_cores=1.25, memory_mib=384),
        restored=size,
        ledger=ledger,
        readings=readings,
    )


def test_three_layers_that_gave_a_tenth_each_pass() -> None:
    assert [check.ok for check in checks.layers_gave([vm()])] == [True, True, True]


@pytest.mark.parametrize("layer", [Layer.APPLICATION, Layer.GUEST, Layer.HYPERVISOR])
def test_a_layer_that_gave_less_than_a_tenth_fails(layer: Layer) -> None:
    ledger = tuple(r.model_copy(update={"verified": r.asked * 0.05}) if r.layer is layer else r for r in LEDGER)
    found = {check.name: check.ok for check in checks.layers_gave([vm(ledger)])}
    # Where pages enough are free, no cold ones have to become so.
    asked = (other for other in Layer if other is not Layer.COLD)
    assert found == {f"the {other.value} layer gave its part": other is not layer for other in asked}


def test_an_empty_ledger_fails_for_every_layer() -> None:
    assert [check.ok for check in checks.layers_gave([vm(())])] == [False, False, False]


def test_the_application_layer_is_never_added_to_the_fall_of_the_bound() -> None:
    assert checks.adds_up(vm()).ok
    guest_only = tuple(r for r in LEDGER if r.layer is not Layer.HYPERVISOR)
    assert not checks.adds_up(vm(guest_only)).ok


def test_a_bound_that_fell_by_another_amount_than_the_ledger_says_fails() -> None:
    assert not checks.adds_up(vm(deflated=DEFLATED.model_copy(update={"balloon_actual_mib": 390}))).ok
    assert not checks.adds_up(vm(deflated=DEFLATED.model_copy(update={"cpus_online": (0,)}))).ok


def test_resident_memory_above_the_bound_and_a_twentieth_fails() -> None:
    assert checks.resident_follows("low-1", DEFLATED.model_copy(update={"resident_mib": 403.0})).ok
    assert not checks.resident_follows("low-1", DEFLATED.model_copy(update={"resident_mib": 404.0})).ok


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cpus_online": (0, 1)}, "CPUs on line"),
        ({"vcpu_quota_cores": (0.625, 0.625, 0.625)}, "cores"),
        ({"virtio_mem_current_mib": 400}, "virtio-mem"),
        ({"balloon_actual_mib": 500}, "balloon"),
        ({"memcached_limit_mib": 240}, "limit"),
        ({"memcached_rss_mib": 245}, "resident size"),
    ],
)
def test_each_reading_that_is_not_back_fails_and_is_named(changes: dict[str, Any], words: str) -> None:
    assert checks.is_restored(vm()).ok
    check = checks.is_restored(vm(restored=NOMINAL.model_copy(update=changes)))
    assert not check.ok
    assert words in check.detail


def test_an_empty_cache_fails_as_not_filled() -> None:
    assert checks.was_filled("low-1", NOMINAL).ok
    assert not checks.was_filled("low-1", NOMINAL.model_copy(update={"memcached_rss_mib": 20})).ok


def test_a_wrong_value_or_too_few_keys_fail() -> None:
    wanted = {f"demo-{number}": value_digest(f"demo-{number}", VALUE_BYTES) for number in range(10)}
    assert checks.keys_answer("low-1", "now", wanted, wanted).ok
    assert not checks.keys_answer("low-1", "now", wanted, wanted | {"demo-3": "0" * 64}).ok
    assert not checks.keys_answer("low-1", "now", wanted, dict(list(wanted.items())[:8])).ok
    assert not checks.keys_answer("low-1", "now", {}, {}).ok


def change(sequence: int, before: float, after: float) -> CoreChange:
    return CoreChange(
        sequence=sequence, machine="low-1", host="host-a", at=1, cores_before=before, cores_after=after, cause=""
    )


def test_a_shrink_without_the_growth_that_followed_fails() -> None:
    outcome = VMOutcome(
        name="low-1",
        generation=1,
        before=Vector(cpu_cores=3),
        after=Vector(cpu_cores=1.25),
        target=Vector(cpu_cores=1.25),
        shortfall=Vector(),
        ledger=(),
        seconds=1,
        sentence="",
    )
    shrink, growth = change(2, 3, 1.25), change(3, 1.25, 3)
    assert checks.cores_were_reported("low-1", [growth, shrink], outcome).ok
    assert not checks.cores_were_reported("low-1", [shrink], outcome).ok
    assert not checks.cores_were_reported("low-1", [growth], outcome).ok

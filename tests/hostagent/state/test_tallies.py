"""What the resizes of a VM are counted as."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import LedgerRow, VMOutcome
from hostagent.state.tallies import Tallies, Tally


def row(layer: Layer, resource: str, asked: float, verified: float, seconds: float = 1.0) -> LedgerRow:
    return LedgerRow(
        layer=layer, resource=resource, asked=asked, promised=asked, verified=verified, seconds=seconds, reason=""
    )


def outcome(before: Vector, target: Vector, *rows: LedgerRow, **more: Any) -> VMOutcome:
    fields: dict[str, Any] = {"after": target, "shortfall": Vector(), "seconds": 2.0, "sentence": "", **more}
    return VMOutcome(name="web", generation=1, before=before, target=target, ledger=rows, **fields)


BIG, SMALL = Vector(cpu_cores=2, memory_mib=1024), Vector(cpu_cores=1, memory_mib=512)


def test_layers_add_up_over_resizes_and_a_layer_works_once_for_all_its_components() -> None:
    tally = Tally()
    rows = (
        row(Layer.GUEST, "cpu_cores", 1.0, 0.0, 1.5),
        row(Layer.GUEST, "memory_mib", 512.0, 256.0, 1.5),
        row(Layer.HYPERVISOR, "cpu_cores", 1.0, 1.0, 0.5),
        row(Layer.HYPERVISOR, "memory_mib", 256.0, 256.0, 0.5),
    )
    for _ in range(2):
        tally.add(outcome(BIG, SMALL, *rows))
    assert tally.resizes == {("deflate", "done"): 2}
    assert tally.asked["deflate", "guest", "memory_mib"] == 1024.0
    assert tally.verified["deflate", "guest", "memory_mib"] == 512.0
    assert tally.verified["deflate", "hypervisor", "cpu_cores"] == 2.0
    assert tally.seconds == {("deflate", "guest"): 3.0, ("deflate", "hypervisor"): 1.0}
    assert not tally.shortfalls


def test_down_in_one_component_and_up_in_another_is_one_of_each() -> None:
    tally = Tally()
    target = Vector(cpu_cores=1, memory_mib=2048)
    tally.add(
        outcome(
            BIG,
            target,
            row(Layer.HYPERVISOR, "cpu_cores", 1.0, 1.0),
            row(Layer.GUEST, "memory_mib", 1024.0, 1000.0),
            shortfall=Vector(memory_mib=24),
        )
    )
    assert tally.resizes == {("deflate", "done"): 1, ("reinflate", "short"): 1}
    assert tally.verified == {
        ("deflate", "hypervisor", "cpu_cores"): 1.0,
        ("reinflate", "guest", "memory_mib"): 1000.0,
    }
    assert tally.shortfalls == {("reinflate", "memory_mib", "guest"): 1}


@pytest.mark.parametrize(
    ("rows", "errors", "reason"),
    [
        ((row(Layer.GUEST, "memory_mib", 9, 3), row(Layer.HYPERVISOR, "memory_mib", 6, 2)), (), "hypervisor"),
        ((row(Layer.GUEST, "memory_mib", 9, 3), row(Layer.HYPERVISOR, "memory_mib", 0, 0)), (), "guest"),
        ((row(Layer.GUEST, "cpu_cores", 9, 3),), (), "unasked"),
        ((row(Layer.GUEST, "memory_mib", 9, 3),), ("libvirt did not answer",), "error"),
    ],
)
def test_a_shortfall_is_the_last_layers_that_was_asked_and_gave_less(
    rows: tuple[LedgerRow, ...], errors: tuple[str, ...], reason: str
) -> None:
    tally = Tally()
    tally.add(outcome(BIG, SMALL, *rows, shortfall=Vector(memory_mib=4), errors=errors))
    assert tally.shortfalls == {("deflate", "memory_mib", reason): 1}
    assert tally.resizes == {("deflate", "error" if errors else "short"): 1}


def test_a_step_of_steady_mode_counts_for_its_layers_and_as_a_resize_only_where_it_failed() -> None:
    tally = Tally()
    partial = outcome(BIG, SMALL, row(Layer.GUEST, "memory_mib", 512.0, 256.0), shortfall=Vector(memory_mib=256))
    tally.add(partial, gently=True)
    assert (tally.resizes, tally.shortfalls) == ({}, {})
    assert tally.verified["deflate", "guest", "memory_mib"] == 256.0
    tally.add(partial.model_copy(update={"errors": ("libvirt did not answer",)}), gently=True)
    assert tally.resizes == {("deflate", "error"): 1}
    assert tally.shortfalls == {("deflate", "memory_mib", "error"): 1}


def test_totals_of_all_vms_begin_at_zero_and_keep_those_of_vms_that_are_gone() -> None:
    tallies = Tallies()
    assert set(tallies.whole.shortfalls.values()) == {0}
    assert len(tallies.whole.seconds) == len(Layer) * 2
    tallies.add(outcome(BIG, SMALL, row(Layer.GUEST, "memory_mib", 9, 3), shortfall=Vector(memory_mib=6)))
    tallies.forget("web")
    assert tallies.whole.resizes == {("deflate", "short"): 1}
    assert tallies.whole.shortfalls["deflate", "memory_mib", "guest"] == 1
    assert tallies.whole.verified["deflate", "guest", "memory_mib"] == 3.0
    assert not tallies.of("web").resizes


def test_a_resize_to_the_size_that_it_has_is_none() -> None:
    tally = Tally()
    tally.add(outcome(BIG, BIG))
    assert not tally.resizes


def test_what_an_application_gave_is_known_from_a_full_size_on_and_never_more_than_its_guest_holds() -> None:
    tally, guest = Tally(), ResourceVector(memory_mib=256.0)
    assert tally.application_holds(guest) is None, "an earlier agent may have seen it"
    assert tally.application_holds(ZERO) == ZERO
    gave = row(Layer.APPLICATION, "memory_mib", 300.0, 300.0)
    tally.add(outcome(BIG, SMALL, gave, row(Layer.GUEST, "memory_mib", 512.0, 256.0)))
    assert tally.application_holds(guest) == guest
    assert tally.application_holds(ResourceVector(memory_mib=100.0)) == ResourceVector(memory_mib=100.0)
    assert tally.application_holds(guest) == ResourceVector(memory_mib=100.0), "the rest was given back before"
    assert tally.application_holds(ZERO) == ZERO

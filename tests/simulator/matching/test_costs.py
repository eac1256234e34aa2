"""Costs of machines: by the paper's sizes, and by hand."""

from __future__ import annotations

import pytest

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.matching.costs import Meter, Prices, VmKind, per_hour


def of_each_kind(cores: float, least: float, prices: Prices) -> list[float]:
    return [per_hour(kind, cores, least, prices) for kind in (VmKind.REGULAR, VmKind.SPOT, VmKind.HARVEST)]


def test_harvested_cores_are_half_as_dear_as_the_minimum() -> None:
    assert of_each_kind(10.0, 2.0, Prices(0.5, 0.5)) == [10.0, 5.0, 3.0]


def test_the_papers_sizes_come_near_to_the_papers_savings() -> None:
    """Minimums of 2, 4 and 8 cores have 15, 17 and 20 on average (§2.1); 40 % cheaper than Spot (§4.4)."""
    mixed = [of_each_kind(cores, least, Prices()) for least, cores in ((2.0, 15.0), (4.0, 17.0), (8.0, 20.0))]
    regular, spot, harvest = (sum(one) for one in zip(*mixed, strict=True))
    assert 1.0 - harvest / spot == pytest.approx(0.40, abs=0.04)
    assert 1.0 - harvest / regular == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("discount", [0.48, 0.88], ids=["the least", "the most"])
def test_every_discount_of_spot_vms_keeps_the_order(discount: float) -> None:
    regular, spot, harvest = of_each_kind(17.0, 4.0, Prices(discount))
    assert harvest < spot < regular


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(InvalidParameter, match="cores"):
        per_hour(VmKind.HARVEST, 1.0, 2.0, Prices())
    for name in ("spot_discount", "harvest_discount"):
        with pytest.raises(InvalidParameter, match=name):
            Prices(**{name: 1.0})


def test_an_hour_of_a_machine_costs_by_its_kind() -> None:
    prices = Prices(0.6, 0.5)
    assert per_hour(VmKind.REGULAR, 8, 8, prices) == 8.0
    assert per_hour(VmKind.SPOT, 8, 8, prices) == pytest.approx(3.2)
    # 2 at the price of Spot, .4 each, and 6 at half of it.
    assert per_hour(VmKind.HARVEST, 8, 2, prices) == pytest.approx(2 * 0.4 + 6 * 0.2)


def test_a_meter_counts_machines_as_they_come_change_and_go() -> None:
    meter = Meter(VmKind.HARVEST, Prices(0.5, 0.5), 3600.0)
    # An hour before it counts.
    meter.change(1, 0.0, 2, 2)
    # From 1 h on 2 cores of the minimum: 1.0. From 2 h on 6 cores: 1.0 + 4 * .25.
    meter.change(1, 7200.0, 6, 2)
    assert meter.total == pytest.approx(1.0)
    # Another one comes at 2.5 h, with 4 cores at the minimum: 2.0 more.
    meter.change(2, 9000.0, 4, 4)
    assert meter.total == pytest.approx(1.0 + 0.5 * 2.0)
    assert meter.per_h == pytest.approx(4.0)
    # The first one goes at 3 h, and an hour goes by.
    meter.change(1, 10_800.0, 0, 0)
    meter.to(14_400.0)
    # What is told late changes nothing of what was.
    meter.to(9000.0)
    assert meter.total == pytest.approx(2.0 + 0.5 * 4.0 + 2.0)
    assert meter.core_h == pytest.approx(2.0 + 0.5 * 6.0 + 0.5 * 10.0 + 4.0)

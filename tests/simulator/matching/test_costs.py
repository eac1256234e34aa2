"""What machines cost: by the paper's sizes, and by hand."""

from __future__ import annotations

import pytest

from simulator.errors import InvalidParameter
from simulator.matching.costs import SPOT_DISCOUNTS, Prices, costs


def test_harvested_cores_are_half_as_dear_as_the_minimum() -> None:
    found = costs(core_h=10.0, machine_h=1.0, least_cores=2.0, prices=Prices(0.5, 0.5))
    assert (found.regular, found.spot, found.harvest) == (10.0, 5.0, 3.0)


def test_the_papers_sizes_come_near_to_the_papers_savings() -> None:
    """Minimums of 2, 4 and 8 cores have 15, 17 and 20 on average (§2.1); 40 % cheaper than Spot (§4.4)."""
    mixed = [costs(cores, 1.0, least, Prices()) for least, cores in ((2.0, 15.0), (4.0, 17.0), (8.0, 20.0))]
    harvest, spot, regular = (sum(getattr(one, name) for one in mixed) for name in ("harvest", "spot", "regular"))
    assert 1.0 - harvest / spot == pytest.approx(0.40, abs=0.04)
    assert 1.0 - harvest / regular == pytest.approx(0.75, abs=0.01)


def test_every_discount_keeps_the_order() -> None:
    for discount in SPOT_DISCOUNTS:
        found = costs(17.0, 1.0, 4.0, Prices(discount))
        assert found.harvest < found.spot < found.regular


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(InvalidParameter, match="core_h"):
        costs(1.0, 1.0, 2.0, Prices())
    for name in ("spot_discount", "harvest_discount"):
        with pytest.raises(InvalidParameter, match=name):
            Prices(**{name: 1.0})

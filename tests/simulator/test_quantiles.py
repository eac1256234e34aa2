"""Durations through known quantiles."""

from __future__ import annotations

import numpy as np
import pytest

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.generators.quantiles import SURF_HALF_YEAR, Quantiles


def test_surf_has_its_shares_median_mean_and_percentile() -> None:
    values = SURF_HALF_YEAR.draw(np.random.default_rng(1), 1_000_000)
    for seconds, share in ((180, 0.49), (900, 0.65), (3600, 0.79), (21_600, 0.95)):
        assert (values <= seconds).mean() == pytest.approx(share, abs=0.003)
    assert np.median(values) == pytest.approx(192, rel=0.02)
    assert SURF_HALF_YEAR.mean_s() / 3600 == pytest.approx(1.83, abs=0.005)
    assert values.mean() == pytest.approx(SURF_HALF_YEAR.mean_s(), rel=0.02)


@pytest.mark.parametrize(
    "points",
    [
        ((0.0, 1.0),),
        ((0.1, 1.0), (1.0, 2.0)),
        ((0.0, 1.0), (0.9, 2.0)),
        ((0.0, 1.0), (0.5, 2.0), (0.5, 3.0), (1.0, 4.0)),
        ((0.0, 0.0), (1.0, 2.0)),
        ((0.0, 3.0), (1.0, 2.0)),
        ((0.0, 1.0), (1.0, float("inf"))),
    ],
)
def test_points_that_are_no_distribution_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(InvalidParameter, match=r"^points must"):
        Quantiles(points)

"""Smallest size of a VM at which its application is useful enough (Sharma et al. 2019, §3.2.1, utility curves; §5).

A curve is a list of points (share of the nominal size, utility), piecewise linear between them and never falling. Below
its first point nothing is known of the application, so no size goes there; beyond its last point it stays level.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.kernels import Row
from ebbtide.deflation.resources import COMPONENTS, QUANTUM, TOLERANCE, ResourceVector

#: (share of nominal in [0, 1], utility).
Points = Sequence[tuple[float, float]]


def check_curve(points: Points, field: str) -> None:
    """Whether these points are a curve.

    :raises InvalidField: no points, shares outside [0, 1] or not rising, a utility that falls or is negative.
    """
    if not points:
        raise InvalidField(field, "must have at least one point [share, utility]")
    for share, utility in points:
        if not 0 <= share <= 1:
            raise InvalidField(field, f"has share {share:g}, which must be within [0, 1]")
        if not math.isfinite(utility) or utility < 0:
            raise InvalidField(field, f"has utility {utility:g}, which must be finite and not negative")
    for (share, utility), (next_share, next_utility) in itertools.pairwise(points):
        if next_share <= share:
            raise InvalidField(field, f"must have rising shares, but {next_share:g} follows {share:g}")
        if next_utility < utility:
            raise InvalidField(field, f"must not fall, but utility {next_utility:g} follows {utility:g}")


def least_share(points: Points, at_least: float, field: str = "utility") -> float:
    """The smallest share of nominal whose utility is at least the wished one.

    :raises InvalidField: no share reaches it.
    """
    before_share, before = points[0]
    if before >= at_least:
        return before_share
    for share, utility in points[1:]:
        if utility >= at_least:
            return before_share + (share - before_share) * (at_least - before) / (utility - before)
        before_share, before = share, utility
    raise InvalidField(field, f"never reaches at_least ({at_least:g}): its most is {before:g}")


def utility_at(shares: Row, utilities: Row, share: float) -> float:
    """What a curve says of a share of nominal; a kernel (see `deflation.kernels`).

    Below its first point nothing is known of the application: a straight line to nothing at all, which promises less
    than any of the curves of Sharma et al. 2019. Beyond its last point it stays level.

    :param shares: the curve's shares, rising, and ``utilities`` beside them; at least one point.
    """
    if share < shares[0]:
        return float(utilities[0] * share / shares[0])
    for k in range(1, len(shares)):
        if share < shares[k]:
            rise = (utilities[k] - utilities[k - 1]) / (shares[k] - shares[k - 1])
            return float(utilities[k - 1] + rise * (share - shares[k - 1]))
    return float(utilities[len(shares) - 1])


def size_of_shares(nominal: ResourceVector, shares: ResourceVector) -> ResourceVector:
    """A share of each component of nominal, rounded up to the grid of sizes and never above nominal.

    :param shares: in [0, 1], by component.
    """
    sizes = {}
    for component in COMPONENTS:
        step = QUANTUM[component]
        exact = nominal[component] * shares[component]
        sizes[component] = min(round(math.ceil(exact / step - TOLERANCE) * step, 6), nominal[component])
    return ResourceVector.of(sizes)

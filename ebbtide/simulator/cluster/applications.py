"""Utility curves: how much of its throughput an application keeps when its VM is deflated (Sharma et al. 2019).

A point is (share of nominal that is left, throughput relative to nominal). Only what the paper's text states in figures
is here; its Fig. 1 and 5 show more, without numbers. Between points curves are straight (`deflation.sharing.utility`).

Running times of Fig. 6 are of runs that were deflated half-way, so a time T at share x says that the second half ran at
``0.5 / (T - 0.5)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ebbtide.deflation.sharing.utility import check_curve
from ebbtide.simulator.cluster.state import Curves
from ebbtide.simulator.errors import InvalidParameter


class Application(NamedTuple):
    """A curve and where it comes from."""

    points: tuple[tuple[float, float], ...]
    source: str


def half_way(running_time: float) -> float:
    """The throughput of the deflated half of a run whose whole takes so much longer than an undisturbed one."""
    return 0.5 / (running_time - 0.5)


APPLICATIONS: Final = {
    "many": Application(((0.5, 0.7), (1.0, 1.0)), "Fig. 1, §2.3: half of everything costs many less than 30 %"),
    "memcached": Application(((0.5, 0.8), (1.0, 1.0)), "Fig. 5a, §6.1: 20 % fewer GETs at half the memory"),
    "kernel-compile": Application(((0.25, 0.7), (1.0, 1.0)), "Fig. 5b, §6.1: 30 % less at a quarter of the CPUs"),
    "spark-als": Application(((0.5, half_way(1.5)), (1.0, 1.0)), "Fig. 6a, §6.2: 1.5 times as long at half"),
    "spark-kmeans": Application(
        ((0.5, half_way(1.38)), (0.75, half_way(1.18)), (1.0, 1.0)),
        "Fig. 6b, §6.2: 18 % longer at three quarters, 38 % at half",
    ),
    # The higher of two: by the running time of Fig. 6c, 1.2 times as long, it would be half_way(1.2), .71.
    "spark-cnn": Application(((0.5, 0.8), (1.0, 1.0)), "Fig. 7b, §6.2: 20 % less at half"),
    "spark-rnn": Application(((0.5, half_way(1.25)), (1.0, 1.0)), "Fig. 6d, §6.2: 25 % longer at half"),
}


def curves_of(names: Sequence[str]) -> Curves:
    """The curves of these applications, as compiled loops read them.

    :raises InvalidParameter: none, or one that is not here.
    """
    if not names:
        raise InvalidParameter("applications", "must not be empty")
    for name in names:
        if name not in APPLICATIONS:
            raise InvalidParameter("applications", f"has {name!r}; there are {', '.join(APPLICATIONS)}")
    rows = [APPLICATIONS[name].points for name in names]
    for name, points in zip(names, rows, strict=True):
        check_curve(points, f"applications.{name}")
    longest = max(len(points) for points in rows)
    shares, utilities = np.ones((len(rows), longest)), np.ones((len(rows), longest))
    for row, points in enumerate(rows):
        shares[row, : len(points)] = [share for share, _ in points]
        utilities[row, : len(points)] = [utility for _, utility in points]
    return Curves(shares, utilities, np.array([len(points) for points in rows], np.int64))

"""What several sections of docs/research/interval-aware.md are made of: the thesis' figures, and verdicts on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from kept_results import Sweep, change, interval, part

#: Of kills in per cent and of goodput in points: figures so far apart still count as the same.
CLOSE_KILLS, CLOSE_GOODPUT = 5.0, 1.0
MIXES = {"four": "4 cores each", "powers": "1, 2, 4, 8", "even": "1 to 8"}
#: Fig. 6.1 to 6.3: kills in per cent and goodput in points against first fit; None: no figure.
HEURISTICS = {
    "h1": ("H1", None, 0.5),  # and more kills (§6.1.1)
    "h2": ("H2", None, None),
    "h3": ("H3", None, -5.35),
    "h4-10": ("H4, A = .1 (the thesis does not say which)", -32.13, -0.9),
    "h4-60": ("H4, A = .6", -32.13, -0.9),
    "ias-10": ("IAS, A = .1", -98.0, -1.25),
    "ias-60": ("IAS, A = .6", -74.93, 2.02),
    "ias-90": ("IAS, A = .9", -32.0, 5.0),
}
#: The combination that became IAS, of no stated A (Fig. 6.2); and kills of jobs under 5 h by H2 alone (§6.1.1).
FIG_6_2, H2_SHORT = (-95.0, -0.2), -8.17
TABLE_6_2 = {
    1.1: (-96.42, 0.27),
    1.2: (-93.52, 0.25),
    1.3: (-88.82, 0.52),
    1.4: (-82.94, 0.89),
    1.5: (-74.93, 2.02),
    1.6: (-59.09, 3.13),
    1.7: (-41.15, 3.81),
    1.8: (-8.03, 2.21),
}
#: Table 4.1: mean durations, h.
MEAN_H = {1.1: 288.09, 1.2: 123.24, 1.3: 58.86, 1.4: 26.07, 1.5: 11.73, 1.6: 5.43, 1.7: 2.90, 1.8: 1.51}
GRIDS = {"miso": "MISO", "ercot": "ERCOT", "spp": "SPP", "caiso": "CAISO"}
#: §4.2, first fit: goodput lost, per cent, and of the kills those of jobs under 30 h.
PAPER_GRIDS = {"miso": ("3.72", ""), "ercot": ("", "33"), "spp": ("", "9"), "caiso": ("30.75", "")}
#: Perotin et al.'s simulator on the Borg window 864000: goodput and waste, per cent of all capacity.
PUBLISHED = {"first fit": (82.2, 14.0), "BSS": (85.2, 3.4), "BP1": (89.9, 6.6), "BS1": (89.0, 7.2)}


def plus(found: tuple[float, float], digits: int = 1) -> str:
    return change(found, digits)


def share(values: np.ndarray) -> str:
    """Per cent with half of the interval."""
    return part(interval(100.0 * values), 1)


def lost(sweep: Sweep, **case: Any) -> float:
    """Goodput lost, of the work that came in the window; per cent."""
    return 100 * (1 - sweep.mean("goodput", **case) / sweep.mean("offered_share", **case))


def not_done(sweep: Sweep, **case: Any) -> tuple[float, float]:
    """Of all jobs of a run how many were not done when it ended, per cent; and at most, of those that came in the
    window."""
    left = 100 * sweep.mean("jobs_left", **case)
    return left / sweep.mean("jobs", **case), left / sweep.mean("jobs_measured", **case)


def verdict(found: tuple[float, float], paper: float | None, close: float, small: bool = False) -> str:
    """Whether a figure is as near to the thesis' as that.

    :param found: with half of its interval.
    :param small: ask that it is told apart from nothing, too; asked always of a figure that is not above ``close``.
    """
    if paper is None:
        return ""
    ours, half = found
    if abs(ours - paper) > close:
        return "missed"
    told = abs(ours) > half and ours * paper > 0
    return "met" if told or not (small or abs(paper) <= close) else "not told apart"


def met(words: list[str]) -> str:
    """Of several verdicts on one claim."""
    return next((word for word in ("missed", "not told apart") if word in words), "met")


def said(held: bool) -> str:
    return "met" if held else "missed"


def all_days(sweep: Sweep, base: dict[str, Any], case: dict[str, Any]) -> float:
    """Kills of a whole run, from empty machines on, against another case; per cent."""
    return 100 * (sweep.mean("kills_all", **case) / sweep.mean("kills_all", **base) - 1)


def tails_met(sweep: Sweep) -> dict[str, int]:
    """How many tails have the thesis' kills, from empty machines on and of the last 30 days; goodput; and both."""
    found = dict.fromkeys(("all", "kills", "goodput", "near", "both"), 0)
    for exponent, (kills, goodput) in TABLE_6_2.items():
        base, case = ({"policy": name, "exponent": exponent} for name in ("first-fit", "ias"))
        killed = verdict(sweep.relative(base, "kills", **case), kills, CLOSE_KILLS)
        done = verdict(sweep.points(base, "goodput", **case), goodput, CLOSE_GOODPUT)
        found["all"] += verdict((all_days(sweep, base, case), 0.0), kills, CLOSE_KILLS) == "met"
        found["kills"] += killed == "met"
        found["goodput"] += done == "met"
        found["near"] += done == "not told apart"
        found["both"] += killed == done == "met"
    return found


def by_mixes(words: list[str]) -> str:
    """Of verdicts on one claim by mix."""
    met_by, unsure = words.count("met"), words.count("not told apart")
    if met_by:
        return f"met by {met_by}{f', not told apart by {unsure}' if unsure else ''} of {len(words)} mixes"
    return f"missed by {len(words) - unsure}, not told apart by {unsure} of {len(words)} mixes" if unsure else "missed"


def of_changes(sweep: Sweep) -> tuple[str, ...]:
    """Verdicts on losses, kills an interval, shorter intervals, and less spread ones by frequency and by step."""
    frequencies = [{"policy": name} for name in ("quarter-15", "once-15", "twice-15", "8-times-15")]
    steps = [{"policy": name} for name in ("once-15", "once-45", "once-60")]

    def falls(figure: Callable[..., float], cases: list[dict[str, str]]) -> bool:
        values = [figure(sweep, exponent=sweep.values("exponent")[0], **case) for case in cases]
        return all(after < before for before, after in itertools.pairwise(values))

    losses, killed = [], []
    for exponent in sweep.values("exponent"):
        for case, least, most in ((frequencies[0], 5, 12), (frequencies[-1], 19, 24), (steps[-1], 15, 23)):
            losses.append(least <= lost(sweep, exponent=exponent, **case) <= most)
        for name, paper in (("twice-15", 10.2), ("once-45", 11.2)):
            case = {"policy": name, "exponent": exponent}
            ended = sweep.mean("intervals", **case)
            rates = sweep.mean("kills_all", **case) / ended, 2 * sweep.mean("kills", **case) / ended
            killed += [abs(found / paper - 1) <= 0.2 for found in rates]
    verdicts = (all(losses), all(killed), falls(length_h, frequencies) and falls(length_h, steps))
    varied = (falls(spread_h, frequencies), falls(spread_h, steps))
    return tuple(said(held) for held in (*verdicts, *varied))


def length_h(sweep: Sweep, **case: Any) -> float:
    """Of intervals, in the mean."""
    return sweep.mean("interval_mean_h", **case)


def spread_h(sweep: Sweep, **case: Any) -> float:
    """The standard deviation of the lengths of intervals, by the means over seeds."""
    return length_h(sweep, **case) * sweep.mean("interval_variation", **case)

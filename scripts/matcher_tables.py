"""Writes the tables of docs/research/matching-simulated.md, of experiments/results/*.json.

``matcher_tables.py [RESULTS...]``: directories that ``ebb sim run`` wrote are first kept as such files: of each case
the values by seed of what is compared, and the means of all else. A ``.json`` that ``calibrating`` wrote is copied.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "experiments" / "results"
PAGE = ROOT / "docs" / "research" / "matching-simulated.md"
BEGIN, END = "<!-- from here on: written by scripts/matcher_tables.py -->", "<!-- up to here -->"
#: Kept by seed, so that schemes are compared seed by seed.
BY_SEED = ("jct_mean_s", "jct_p90_s", "jct_geometric_mean_s", "waste", "kills_per_task", "wait_mean_s", "cost_total")
MEAN, P90, NJCT = BY_SEED[:3]
#: Of t with 9 degrees of freedom: ten seeds.
T_9 = 2.262


def keep(directory: Path) -> None:
    """Keep a sweep."""
    from ebbtide.simulator.experiments import load

    results = load(directory)
    meta = results.meta
    kept = {name: meta[name] for name in ("name", "version", "commit", "seeds", "settings")}
    kept["command"] = " ".join(_without_places(str(meta["command"]).split()))
    kept["inputs"] = {name: given["sha256"] for name, given in meta["inputs"].items()}
    cases = []
    for case in results.cases():
        rows = np.ones(len(results.columns["seed"]), bool)
        for name, value in case.items():
            rows &= results.columns[name] == value
        order = np.argsort(results.columns["seed"][rows])
        values = {name: results.columns[name][rows][order] for name in results.metrics}
        found = {name: [_short(x) for x in column] for name, column in values.items() if name in BY_SEED}
        found |= {name: _short(float(column.mean())) for name, column in values.items() if name not in BY_SEED}
        cases.append(
            json.dumps(case | {name: value for name, value in found.items() if value not in (None, [None] * 10)})
        )
    text = f'{json.dumps(kept)[:-1]},\n"cases": [\n' + ",\n".join(cases) + "\n]}\n"
    (KEPT / f"{meta['name']}.json").write_text(text, encoding="utf-8")


def _without_places(words: list[str]) -> Iterator[str]:
    """What was run, wherever its results were put and with however many processes."""
    skipped = False
    for word in words:
        if skipped or word in ("--results", "--workers"):
            skipped = not skipped
            continue
        yield word


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if value == value else None


class Sweep:
    """A kept sweep."""

    def __init__(self, name: str) -> None:
        self.kept: dict[str, Any] = json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))

    def of(self, metric: str, **case: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
        """By seed."""
        return np.array(self._case(case)[metric], np.float64)

    def mean(self, metric: str, **case: Any) -> float:
        return float(np.mean(self._case(case)[metric]))

    def against(self, other: dict[str, Any], metric: str, **case: Any) -> tuple[float, float]:
        """The change of a mean in per cent against another case, and half of its 95 % interval, seed by seed."""
        return _interval(100.0 * (self.of(metric, **case) / self.of(metric, **other) - 1.0))

    def share(self, base: dict[str, Any], best: dict[str, Any], metric: str, **case: Any) -> tuple[float, float]:
        """What a case has of the gain of the best over the base, and half of its 95 % interval (jackknife)."""
        ours, theirs = (1.0 - self.of(metric, **one) / self.of(metric, **base) for one in (case, best))
        count = len(ours)
        without = np.array([(ours.sum() - a) / (theirs.sum() - b) for a, b in zip(ours, theirs, strict=True)])
        spread = math.sqrt((count - 1) / count * float(((without - without.mean()) ** 2).sum()))
        return float(ours.sum() / theirs.sum()), T_9 * spread

    def values(self, name: str) -> list[Any]:
        """Of an axis, in order."""
        return list(dict.fromkeys(one[name] for one in self.kept["cases"]))

    def _case(self, case: dict[str, Any]) -> dict[str, Any]:
        (found,) = (one for one in self.kept["cases"] if all(one[name] == case[name] for name in case))
        return dict(found)

    @property
    def command(self) -> str:
        seeds = self.kept["seeds"]
        return f"`{self.kept['command']}`, seeds {seeds[0]} to {seeds[-1]}, jobs and pool drawn anew by each."


def _interval(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    return float(values.mean()), T_9 * float(values.std(ddof=1)) / math.sqrt(len(values))


def change(found: tuple[float, float]) -> str:
    """Per cent with half of the interval."""
    return f"{found[0]:+.0f} ± {found[1]:.0f}"


def part(found: tuple[float, float]) -> str:
    """A share with half of the interval."""
    return f"{found[0]:.2f} ± {found[1]:.2f}"


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def head(*cells: str) -> Iterator[str]:
    yield row(*cells)
    yield "|" + "---|" * len(cells)


def aim(sweep: Sweep, base: dict[str, Any], live: dict[str, Any], best: dict[str, Any]) -> tuple[list[str], str]:
    """Shares of the Oracle's gain over the same order, and whether the aim is met.

    75 % of the mean gain and 60 % of the p90's where the Oracle gains at least 15 % of the mean; nowhere 2 % worse.
    """
    gain = -sweep.against(base, MEAN, **best)[0]
    shares = [sweep.share(base, best, metric, **live) for metric in (MEAN, P90)]
    worse = sweep.against(base, MEAN, **live)[0]
    if gain < 15.0:
        return [part(one) for one in shares], "missed" if worse > 2.0 else f"not asked (Oracle gains {gain:.0f} %)"
    met = shares[0][0] >= 0.75 and shares[1][0] >= 0.60
    return [part(one) for one in shares], "met" if met else "missed"


def orders() -> Iterator[str]:
    sweep = Sweep("orders")
    yield from ("## Like for like: the order of kills", "", sweep.command, "")
    yield from (
        "Each row against the same order of kills without prediction (random node); mean, p90 of completion times, per",
        "cent. First column: that order itself against YARN's (the oldest goes, to the end of the queue).",
        "",
    )
    yield from head(
        "pool, order", "the order alone", "its waste, %", "`live`", "waste, %", "Oracle", "of its gain: mean", "p90", ""
    )
    words = {"oldest-tail": "oldest, to the end", "newest-tail": "newest, to the end"}
    words |= {"newest-head": "newest, place kept", "least-lost-head": "least work lost, place kept"}
    for packing in sweep.values("packing"):
        yarn = {"packing": packing, "policy": "random-oldest-tail"}
        for order, text in words.items():
            base, live = ({"packing": packing, "policy": f"{who}-{order}"} for who in ("random", "live"))
            # The Oracle loses no task: where killed ones wait is nothing to it.
            best = {"packing": packing, "policy": "oracle-newest-head"}
            shares, word = aim(sweep, base, live, best)
            yield row(
                f"{packing}: {text}",
                ", ".join(change(sweep.against(yarn, metric, **base)) for metric in (MEAN, P90)),
                f"{100 * sweep.mean('waste', **base):.1f}",
                ", ".join(change(sweep.against(base, metric, **live)) for metric in (MEAN, P90)),
                f"{100 * sweep.mean('waste', **live):.1f}",
                ", ".join(change(sweep.against(base, metric, **best)) for metric in (MEAN, P90)),
                *shares,
                word,
            )
    yield ""
    for packing in sweep.values("packing"):
        base = {"packing": packing, "policy": "random-newest-head"}
        sized = {"packing": packing, "policy": "sized-newest-head"}
        found = [change(sweep.against(base, metric, **sized)) for metric in (MEAN, P90)]
        yield f"* {packing}, newest, place kept, by Eq. 1 with sizes instead of landmarks: {', '.join(found)}."


def heartbeats() -> Iterator[str]:
    sweep = Sweep("heartbeats")
    yield from ("## The paper's scheduler: Algorithm 3", "", sweep.command, "")
    yield from ("Against CapacityScheduler with a random node in the same order; mean, p90, per cent; waste.", "")
    pools = sweep.values("packing")
    yield from head("scheme", *pools)
    for policy in sweep.values("policy"):
        cells = []
        for packing in pools:
            base = {"packing": packing, "policy": "capacity-random"}
            case = {"packing": packing, "policy": policy}
            found = ", ".join(change(sweep.against(base, metric, **case)) for metric in (MEAN, P90))
            cells.append(f"{found}; {100 * sweep.mean('waste', **case):.1f} %")
        yield row(HEARTBEATS.get(policy, policy), *cells)


HEARTBEATS = {
    "capacity-random": "CapacityScheduler, random node",
    "capacity-filling": "CapacityScheduler, filling of the node that reports",
    "algorithm-1": "Algorithm 1, completed intervals",
    "oracle-no-shrink": "the paper's Oracle (no shrink at all)",
} | {
    f"{key}-{threshold}": f"Algorithm 3, {text}, threshold {threshold / 100:g}"
    for key, text in (
        ("algorithm-3", "completed intervals"),
        ("censored-3", "running intervals"),
        ("sized-3", "running intervals and sizes"),
    )
    for threshold in (0, 10, 30, 50, 70, 90)
}

#: Name, the paper's range, unit: Fig. 1 and 2 and §2.1.
SHAPE = (
    ("pool_gap_mean_min", "mean gap, min", "26 to 224", 26, 224),
    ("pool_within_1_h", "of all gaps, within an hour", ".72 to .93", 0.72, 0.93),
    ("pool_gap_p95_min", "p95 of gaps, min", "72 to 672", 72, 672),
    ("pool_change_mean_cores", "mean change, threads", "5 to 13", 5, 13),
    ("pool_hour_p50_changes", "changes in an hour, median", "at most 1", 0, 1),
    ("pool_hour_p90_changes", "changes in an hour, p90", "tens", 10, 100),
    ("pool_day_p50_changes", "changes in a day, median", "no figure", None, None),
    ("pool_day_p90_changes", "changes in a day, p90", "no figure", None, None),
    ("pool_rank_correlation", "rank correlation, hour to hour", "no figure", None, None),
    ("pool_cores_p90", "threads of the largest tenth, at least", "36 to 39", 36, 39),
)


def persistent() -> Iterator[str]:
    sweep = Sweep("persistent")
    lives = sweep.values("least_lifetime_s")
    yield from ("## Pools like the paper's", "", sweep.command, "")
    yield from (
        "On-demand VMs go to the fullest of ten servers drawn, batches stay together, two threads a core; means over",
        "seeds.",
        "",
    )
    titles = ["all VMs" if not life else f"VMs of at least {life / 3600:g} h" for life in lives]
    yield from head("", "the paper (C1 to C6)", *titles, "")
    for name, text, paper, least, most in SHAPE:
        found = [sweep.mean(name, policy="yarn", least_lifetime_s=life) for life in lives]
        word = "not comparable"
        if least is not None:
            word = "met" if all(least <= value <= most for value in found) else "missed by one or both"
        yield row(text, paper, *(f"{value:.2f}" if value < 2 else f"{value:.0f}" for value in found), word)
    yield from ("", "Completion times there, mean and p90 against the same order without prediction, per cent:", "")
    yield from head("scheme", *titles)
    shown = (
        ("yarn-algorithm-3", "yarn", "YARN's order: Algorithm 3, threshold .7"),
        ("yarn-live", "yarn", "YARN's order: `live`"),
        ("yarn-oracle", "yarn", "YARN's order: the paper's Oracle"),
        ("random", "yarn", "a manager's order alone, against YARN's"),
        ("live", "random", "a manager's order: `live`"),
        ("oracle", "random", "a manager's order: Oracle, no shrink that kills"),
    )
    for policy, against, text in shown:
        cells = []
        for life in lives:
            case, base = ({"least_lifetime_s": life, "policy": who} for who in (policy, against))
            found = ", ".join(change(sweep.against(base, metric, **case)) for metric in (MEAN, P90))
            cells.append(f"{found}; {100 * sweep.mean('waste', **case):.1f} %")
        yield row(text, *cells)
    for number, life in enumerate(lives):
        base, live, best = ({"least_lifetime_s": life, "policy": who} for who in ("random", "live", "oracle"))
        shares, word = aim(sweep, base, live, best)
        yield ""
        yield f"Of the Oracle's gain over the same order, {titles[number]}: mean {shares[0]}, p90 {shares[1]}: {word}."


def acquirer() -> Iterator[str]:
    sweep = Sweep("acquirer-persistent")
    yield from ("## The acquirer where servers persist (Fig. 16)", "", sweep.command, "")
    yield from (
        "Against CapacityScheduler (random node) without replacement; geometric mean of nJCT, p90, per cent. The",
        "paper: 8 to 23 % by the acquirer alone, 16 to 24 % by the matcher alone, 27 to 32 % by both.",
        "",
    )
    yield from head("", "nJCT", "p90", "waste, %", "given back", "cores held")
    base = {"policy": "none"}
    for policy, text in (
        ("none", "nothing is replaced"),
        ("recent", "acquirer alone: the most recently changed (Algorithm 2)"),
        ("stability", "acquirer alone: the least stable"),
        ("matcher", "matcher alone (`live`)"),
        ("matcher-recent", "both: the most recently changed"),
        ("matcher-stability", "both: the least stable"),
    ):
        case = {"policy": policy}
        yield row(
            text,
            *(change(sweep.against(base, metric, **case)) for metric in (NJCT, P90)),
            f"{100 * sweep.mean('waste', **case):.1f}",
            f"{sweep.mean('machines_given_back', **case):.0f}",
            f"{sweep.mean('cores_held_mean', **case):.0f}",
        )
    best = min(sweep.against(base, NJCT, policy=policy)[0] for policy in ("recent", "stability"))
    yield from ("", f"The aim, at least 8 % by the acquirer alone, is {'met' if best <= -8 else 'missed'}.")


def loads() -> Iterator[str]:
    sweep = Sweep("matching-load")
    yield from ("## Load and duration (Fig. 12 and 14)", "", sweep.command, "")
    yield from ("Pool random; a manager's order of kills for all; mean and p90, per cent.", "")
    yield from head("load, tasks up to", "waste, %", "`live`", "waste, %", "Oracle", "of its gain: mean", "p90", "")
    for load in sweep.values("load"):
        for most in sweep.values("most_task_s"):
            at = {"load": load, "most_task_s": most}
            base, live, best = ({"policy": who, **at} for who in ("capacity-random", "live", "oracle-no-kill"))
            shares, word = aim(sweep, base, live, best)
            yield row(
                f"{load:g}, {most / 60:.0f} min",
                f"{100 * sweep.mean('waste', **base):.1f}",
                ", ".join(change(sweep.against(base, metric, **live)) for metric in (MEAN, P90)),
                f"{100 * sweep.mean('waste', **live):.1f}",
                ", ".join(change(sweep.against(base, metric, **best)) for metric in (MEAN, P90)),
                *shares,
                word,
            )


def nine() -> Iterator[str]:
    sweep = Sweep("matching")
    yield from ("## Nine pools (Fig. 9)", "", sweep.command, "")
    yield from ("A manager's order of kills for all, against a random node in that order; mean and p90, per cent.", "")
    yield from head(
        "pool (VMs of at least)", "gap, within 1 h", "waste, %", "filling", "`live`", "waste, %", "Oracle",
        "of its gain: mean", "p90", "",
    )  # fmt: skip
    for packing in sweep.values("packing"):
        for life in sweep.values("least_lifetime_s"):
            at = {"packing": packing, "least_lifetime_s": life}
            base, live, best = ({"policy": who, **at} for who in ("capacity-random", "live", "oracle-no-kill"))
            shares, word = aim(sweep, base, live, best)
            filling = {"policy": "capacity-filling", **at}
            lasts = "any" if not life else f"{life / 3600:g} h"
            gap, within = (sweep.mean(name, **base) for name in ("pool_gap_mean_min", "pool_within_1_h"))
            yield row(
                f"{packing} ({lasts})",
                f"{gap:.0f} min, {within:.0%}",
                f"{100 * sweep.mean('waste', **base):.1f}",
                *(
                    ", ".join(change(sweep.against(base, metric, **case)) for metric in (MEAN, P90))
                    for case in (filling, live)
                ),
                f"{100 * sweep.mean('waste', **live):.1f}",
                ", ".join(change(sweep.against(base, metric, **best)) for metric in (MEAN, P90)),
                *shares,
                word,
            )


def calibration() -> Iterator[str]:
    kept = json.loads((KEPT / "calibration.json").read_text(encoding="utf-8"))
    yield from ("## Calibration of the live default", "", f"`{kept['command']}`: pools on which nothing was tuned.", "")
    yield from head("pool", "outcomes", "Brier score", "worst decile of 200 or more, points", "")
    for one in kept["pools"]:
        worst = 100 * one["worst"]
        yield row(
            one["pool"], f"{one['count']}", f"{one['brier']:.3f}", f"{worst:.1f}", "met" if worst <= 5 else "missed"
        )


#: Sections by the results that they are made of.
SECTIONS = {
    "orders": orders,
    "heartbeats": heartbeats,
    "persistent": persistent,
    "acquirer-persistent": acquirer,
    "matching": nine,
    "matching-load": loads,
    "calibration": calibration,
}


def tables() -> Iterator[str]:
    """The lines."""
    for name, section in SECTIONS.items():
        if (KEPT / f"{name}.json").exists():
            yield from section()
            yield ""


def written(page: str) -> str:
    """The page with the tables in their place."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n" + "\n".join(tables()) + f"\n{END}" + rest.split(END)[1]


def main(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if argument.endswith(".json"):
            text = Path(argument).read_text(encoding="utf-8")
            (KEPT / Path(argument).name).write_text(text, encoding="utf-8")
        else:
            keep(Path(argument))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

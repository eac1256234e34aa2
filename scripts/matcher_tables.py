"""Writes the tables of docs/research/matching-simulated.md, of experiments/results/*.json.

``matcher_tables.py [RESULTS...]``: directories that ``ebb sim run`` wrote are first kept as such files: of each case
the values by seed of what is compared, and the means of all else.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from kept_results import (
    MEAN,
    NJCT,
    P90,
    ROOT,
    Sweep,
    begin,
    change,
    head,
    interval,
    part,
    placed,
    rewrite,
    row,
    sections,
)

PAGE = ROOT / "docs" / "research" / "matching-simulated.md"
BEGIN = begin("matcher_tables.py")


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


def compared(sweep: Sweep, base: dict[str, Any], metrics: Sequence[str] = (MEAN, P90), **case: Any) -> str:
    """The change of these metrics against a base, per cent, and what is wasted."""
    found = ", ".join(change(sweep.against(base, metric, **case)) for metric in metrics)
    return f"{found}; {100 * sweep.mean('waste', **case):.1f} %"


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
            cells.append(compared(sweep, base, packing=packing, policy=policy))
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
    for threshold in (30, 50, 70)
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
            base = {"least_lifetime_s": life, "policy": against}
            cells.append(compared(sweep, base, least_lifetime_s=life, policy=policy))
        yield row(text, *cells)
    for number, life in enumerate(lives):
        base, live, best = ({"least_lifetime_s": life, "policy": who} for who in ("random", "live", "oracle"))
        shares, word = aim(sweep, base, live, best)
        yield ""
        yield f"Of the Oracle's gain over the same order, {titles[number]}: mean {shares[0]}, p90 {shares[1]}: {word}."


def replaced(sweep: Sweep, *policies: tuple[str, str]) -> Iterator[str]:
    """A row for each policy, by its name and in words, against no replacement."""
    yield from head("", "nJCT", "p90", "waste, %", "given back", "cores held")
    for policy, text in policies:
        case = {"policy": policy}
        yield row(
            text,
            *(change(sweep.against({"policy": "none"}, metric, **case)) for metric in (NJCT, P90)),
            f"{100 * sweep.mean('waste', **case):.1f}",
            f"{sweep.mean('machines_given_back', **case):.0f}",
            f"{sweep.mean('cores_held_mean', **case):.0f}",
        )


def acquirer() -> Iterator[str]:
    sweep = Sweep("acquirer-persistent")
    yield from ("## The acquirer where servers persist (Fig. 16)", "", sweep.command, "")
    yield from (
        "Against CapacityScheduler (random node) without replacement; geometric mean of nJCT, p90, per cent. The",
        "paper: 8 to 23 % by the acquirer alone, 16 to 24 % by the matcher alone, 27 to 32 % by both. All are asked to",
        "hold as many cores; what they do hold differs, so that not all of a difference is the rule's.",
        "",
    )
    yield from replaced(
        sweep,
        ("none", "nothing is replaced"),
        ("recent", "acquirer alone: the most recently changed (Algorithm 2)"),
        ("stability", "acquirer alone: the least stable"),
        ("matcher", "matcher alone (`live`)"),
        ("matcher-recent", "both: the most recently changed"),
        ("matcher-stability", "both: the least stable"),
    )
    best = min(sweep.against({"policy": "none"}, NJCT, policy=policy)[0] for policy in ("recent", "stability"))
    yield from ("", f"The aim, at least 8 % by the acquirer alone, is {'met' if best <= -8 else 'missed'}.")


def bounds() -> Iterator[str]:
    sweep = Sweep("acquirer-bounds")
    yield from ("## What an acquirer can gain there", "", sweep.command, "")
    yield from (
        "Against CapacityScheduler without replacement, as above; geometric mean of nJCT, p90, per cent. None of these",
        "can be had: they say what the best of rules would gain.",
        "",
    )
    yield from replaced(
        sweep,
        ("none", "nothing is replaced"),
        ("future", "acquirer alone that knows the next four hours, a tenth of the cores an hour"),
        ("future-half", "the same, up to half of the cores an hour"),
        ("lossless", "nothing is replaced, but a kill costs no work, and its task keeps its place"),
    )


def costs() -> Iterator[str]:
    sweep = Sweep("costs-persistent")
    yield from ("## Costs where servers persist (Fig. 17 and 18)", "", sweep.command, "")
    yield from (
        "Jobs come once and four times as often in turn, six hours each; pools of one kind, scaled hourly to 60 to 80",
        "% of their cores; YARN's order of kills for all. Costs in core-hours of a regular VM; changes in per cent,",
        "seed by seed; nJCT: ratio of geometric means. The paper: harvest VMs 40 % cheaper than Spot VMs and 75 %",
        "than regular ones, completion times 20 % below Spot's, with matcher and acquirer 33 %, and these save 14.2 %",
        "of the cost.",
        "",
    )
    cells = ("cost, against Spot", "against regular", "against harvest alone", "nJCT against Spot", "waste, %")
    yield from head("tasks up to", "pool", *cells, "utilisation, %", "cores paid")
    for longest in sweep.values("most_task_s"):
        at = {"most_task_s": longest}
        spot, regular, plain = ({"policy": name, **at} for name in ("spot", "regular", "harvest"))
        for policy, text in COSTS.items():
            case = {"policy": policy, **at}
            against = (change(sweep.against(other, "cost_total", **case)) for other in (spot, regular, plain))
            yield row(
                f"{longest / 60:.0f} min",
                text,
                *against,
                change(sweep.against(spot, NJCT, **case)),
                f"{100 * sweep.mean('waste', **case):.1f}",
                f"{100 * sweep.mean('utilisation', **case):.0f}",
                f"{sweep.mean('cores_paid_mean', **case):.0f}",
            )


COSTS = {
    "spot": "Spot, CapacityScheduler",
    "harvest": "harvest, CapacityScheduler",
    "harvest-live": "harvest, `live` and acquirer (Algorithm 2)",
    "harvest-live-stability": "harvest, `live` and acquirer (by stability)",
    "lossless": "harvest, CapacityScheduler, but a kill costs no work, and its task keeps its place",
    "regular": "regular, CapacityScheduler",
}


def allocations() -> Iterator[str]:
    sweep = Sweep("acquirer")
    yield from ("## The acquirer where all servers are alike", "", sweep.command, "")
    yield from (
        "Against CapacityScheduler (random node) without replacement in the same order of kills, a manager's;",
        "geometric mean of nJCT, p90, per cent; waste. On-demand VMs are placed at random. By how the provider places",
        "harvest VMs; replaced is the tenth that changed last, each hour (Algorithm 2).",
        "",
    )
    schemes = ("capacity-random", "landmark", "live")
    titles = [f"{name}{text}" for name in ("random node", "landmarks", "`live`") for text in ("", ", and the acquirer")]
    yield from head("allocation", *titles)
    for allocation in sweep.values("allocation"):
        base = {"allocation": allocation, "policy": "capacity-random", "replaced_share": 0.0}
        cells = []
        for policy in schemes:
            for share in sweep.values("replaced_share"):
                case = {"allocation": allocation, "policy": policy, "replaced_share": share}
                cells.append(compared(sweep, base, (NJCT, P90), **case))
        yield row(allocation, *cells)


def runtimes() -> Iterator[str]:
    sweep = Sweep("runtimes")
    yield from ("## How runtimes are distributed (Fig. 11)", "", sweep.command, "")
    yield from (
        "All VMs of the pool that persists, YARN's order of kills for all, against a random node; mean, p90, per cent;",
        "waste.",
        "",
    )
    policies = ("paper-heartbeat", "live", "oracle-no-shrink")
    titles = ("Algorithm 3, completed intervals, threshold .7", "`live`", "the paper's Oracle")
    yield from head("runtimes", "waste, %", *titles)
    for shape in sweep.values("shape"):
        base = {"shape": shape, "policy": "capacity-random"}
        cells = (compared(sweep, base, shape=shape, policy=policy) for policy in policies)
        yield row(shape, f"{100 * sweep.mean('waste', **base):.1f}", *cells)


def estimated() -> Iterator[str]:
    sweep = Sweep("estimates")
    yield from ("## Wrong estimates (Fig. 15)", "", sweep.command, "")
    yield from (
        "Tasks are said to run so many times as long as they do, but for a relative error drawn evenly from [-e, e];",
        "all VMs of the pool that persists, a manager's order of kills for all. Mean, p90, per cent, against right",
        "estimates; mean against a random node in the same order, which asks for none.",
        "",
    )
    yield from head("said", "`live`, against right estimates", "against a random node", "waste, %")
    right = {"estimate_factor": 1.0, "estimate_error": 0.0}

    def one(text: str, **case: Any) -> str:
        found = ", ".join(change(sweep.against({"policy": "live", **right}, metric, **case)) for metric in (MEAN, P90))
        plain = change(sweep.against({"policy": "capacity-random", **right}, MEAN, **case))
        return row(text, found, plain, f"{100 * sweep.mean('waste', **case):.1f}")

    for factor in sweep.values("estimate_factor"):
        for error in sweep.values("estimate_error"):
            words = "as long" if factor == 1 else f"{factor:g} times as long"
            text = words + (f", off by up to {100 * error:.0f} %" if error else "")
            yield one(text, policy="live", estimate_factor=factor, estimate_error=error)
    yield one("nothing of any task", policy="live-nothing-said", **right)


def calm() -> Iterator[str]:
    sweep = Sweep("calm")
    yield from ("## Calm pools", "", sweep.command, "")
    yield from (
        "VMs that live a day and longer, tasks of up to four hours; a manager's order of kills for all, against a",
        "random node in that order; mean, p90, per cent; waste.",
        "",
    )
    policies = [policy for policy in sweep.values("policy") if policy != "capacity-random"]
    yield from head("pool", "mean gap", "waste, %", *(CALM[policy] for policy in policies))
    for packing in sweep.values("packing"):
        base = {"packing": packing, "policy": "capacity-random"}
        cells = (compared(sweep, base, packing=packing, policy=policy) for policy in policies)
        waste = f"{100 * sweep.mean('waste', **base):.1f}"
        yield row(packing, f"{sweep.mean('pool_gap_mean_min', **base):.0f} min", waste, *cells)


CALM = {
    "capacity-filling": "filling of the node that reports",
    "paper": "Algorithm 1, completed intervals",
    "sized": "Eq. 1, and the size of shrinks",
    "landmark": "landmarks",
    "live": "`live`",
    "oracle-no-kill": "Oracle, no shrink that kills",
}


def wind() -> Iterator[str]:
    sweep = Sweep("wind")
    yield from ("## Renewable power (Fig. 19)", "", sweep.command, "")
    days = {at: f"day {at / 86400:.0f}" for at in sweep.values("power_from_s")}
    cases = [(at, cut) for cut in sweep.values("power_cut") for at in days]
    yield from ("The pools, and what CapacityScheduler (random node) loses there; means over seeds:", "")
    yield from head("pool: day, cut", "mean gap", "within 10 min", "within 1 h", "mean change", "cores", "waste, %")
    for at, cut in cases:
        base = {"power_from_s": at, "power_cut": cut, "policy": "capacity-random"}
        yield row(
            f"{days[at]}, {cut}",
            f"{sweep.mean('pool_gap_mean_min', **base):.0f} min",
            *(f"{100 * sweep.mean(f'pool_within_{what}', **base):.0f} %" for what in ("10_min", "1_h")),
            f"{sweep.mean('pool_change_mean_cores', **base):.1f}",
            f"{sweep.mean('pool_mean_cores', **base):.0f}",
            f"{100 * sweep.mean('waste', **base):.1f}",
        )
    yield from ("", "A manager's order of kills for all, against that; mean, p90, per cent; waste:", "")
    yield from head("scheme", *(f"{days[at]}, {cut}" for at, cut in cases))
    for policy in sweep.values("policy"):
        if policy == "capacity-random":
            continue
        cells = []
        for at, cut in cases:
            base = {"power_from_s": at, "power_cut": cut, "policy": "capacity-random"}
            cells.append(compared(sweep, base, **(base | {"policy": policy})))
        yield row(CALM[policy], *cells)


def gains(name: str, axes: Sequence[str], first: str) -> Iterator[str]:
    """A row for each case: `live` and Oracle against a random node in the same order, and the aim."""
    sweep = Sweep(name)
    yield from (sweep.command, "")
    yield from ("A manager's order of kills for all, against a random node in that order; mean and p90, per cent.", "")
    shares = ("of its gain: mean", "p90", "")
    yield from head(first, "mean gap", "waste, %", "`live`", "waste, %", "Oracle", *shares)
    for one in sweep.values(axes[0]):
        for other in sweep.values(axes[1]):
            at = {axes[0]: one, axes[1]: other}
            base, live, best = ({"policy": who, **at} for who in ("capacity-random", "live", "oracle-no-kill"))
            found, word = aim(sweep, base, live, best)
            yield row(
                f"{one}, {other / 60:.0f} min",
                f"{sweep.mean('pool_gap_mean_min', **base):.0f} min",
                f"{100 * sweep.mean('waste', **base):.1f}",
                ", ".join(change(sweep.against(base, metric, **live)) for metric in (MEAN, P90)),
                f"{100 * sweep.mean('waste', **live):.1f}",
                ", ".join(change(sweep.against(base, metric, **best)) for metric in (MEAN, P90)),
                *found,
                word,
            )


def loads() -> Iterator[str]:
    yield from ("## Load and duration (Fig. 12 and 14)", "")
    yield from gains("matching-load", ("load", "most_task_s"), "load, tasks up to")


def nine() -> Iterator[str]:
    yield from ("## Nine pools (Fig. 9)", "")
    yield from gains("matching", ("packing", "least_lifetime_s"), "pool, VMs of at least")


def deciles(sweep: Sweep, kind: str, **case: Any) -> tuple[list[tuple[float, float]], float]:
    """Of each decile how many outcomes there are, and observed less predicted in points; the largest of 200 or more."""
    seeds = len(sweep.kept["seeds"])
    found = []
    for decile in range(10):
        count, predicted, observed = (
            sweep.mean(f"calibration_{kind}_{decile}_{what}", **case) for what in ("count", "predicted", "observed")
        )
        found.append((count * seeds, 100.0 * (observed - predicted) / count if count else math.nan))
    return found, max(abs(error) for count, error in found if count >= 200)


def calibration() -> Iterator[str]:
    sweep = Sweep("calibration")
    yield from ("## Calibration of the live default", "", sweep.command, "")
    yield from (
        "Observed less predicted, in points, by decile of what was predicted, all seeds together; below 0 too much is",
        "promised. - : fewer than 200 outcomes. Tasks: those that `live` starts. Machines: all, every 15 minutes, for",
        "10 min to 2 h and 0, 2 and 6 cores left free. Later: from day 6 on instead of 4.25. The aim is at",
        "most 5 points in every decile.",
        "",
    )
    yield from head("pool, VMs of at least", "of", "outcomes", *(f".{one}" for one in range(10)), "worst", "")
    for case in sweep.kept["cases"]:
        at = {name: case[name] for name in ("policy", "least_lifetime_s")}
        for kind, text in (("started", "tasks"), ("machines", "machines")):
            found, worst = deciles(sweep, kind, **at)
            cells = ("-" if count < 200 else f"{error:+.1f}" for count, error in found)
            yield row(
                f"{at['policy']}, {at['least_lifetime_s'] / 60:.0f} min",
                text,
                f"{sum(count for count, _ in found):.0f}",
                *cells,
                f"{worst:.1f}",
                "met" if worst <= 5 else "missed",
            )
    for run, why in sweep.kept.get("failed", {}).items():
        yield from ("", f"Left out is `{run}`:", f"of one seed {why}.")


def foresight() -> Iterator[str]:
    sweep = Sweep("foresight")
    yield from ("## What could be known where servers are alike", "", sweep.command, "")
    yield from (
        "Every half hour a machine is picked for a task that leaves 0, 2 or 6 cores free, for 10 min to 2 h: how",
        "often it keeps the room, per cent. Who knows the VMs to come knows each that will come and go, and not which",
        "server it goes to: three other draws of the same VMs say how many servers with as many cores keep the room.",
        "Last columns: the part of what who knows all is better than anyone, that the others have; mean squared",
        "errors of the two predictions.",
        "",
    )
    cells = ("anyone", "`live`", "knows the VMs to come", "both", "knows all", "`live` has", "both have", "errors")
    yield from head("pool", *cells)
    for packing in sweep.values("packing"):
        names = ("random", "predicted", "known", "both", "best")
        picked = {name: 100 * sweep.mean(f"picked_{name}", packing=packing) for name in names}
        parts = [
            (picked[name] - picked["random"]) / (picked["best"] - picked["random"]) for name in ("predicted", "both")
        ]
        errors = (sweep.mean(f"picks_{name}_brier", packing=packing) for name in ("predicted", "known"))
        yield row(
            packing,
            *(f"{value:.1f}" for value in picked.values()),
            *(f"{value:.2f}" for value in parts),
            ", ".join(f"{value:.3f}" for value in errors),
        )


RIVALS = {
    "checkpoint-1-min": "CapacityScheduler, checkpoints of 1 min every 10 (Fig. 20)",
    "checkpoint-2-min": "CapacityScheduler, checkpoints of 2 min every 10 (Fig. 20)",
    "replicas-3": "CapacityScheduler, three replicas (Fig. 21)",
    "paper": "Algorithm 1, Eq. 1, completed intervals",
    "paper-no-delay": "the same without delay",
    "paper-heartbeat": "Algorithm 3, Eq. 1, completed intervals, threshold .7",
    "censored": "Algorithm 1, Eq. 1, running intervals too",
    "promises": "and promises",
    "equation-3": "the same by Eq. 3 (Fig. 22)",
    "sized": "Eq. 1, and the size of shrinks",
    "landmark": "landmarks",
    "live": "`live`: landmarks, `escalation` and `spread`",
}


def rivals() -> Iterator[str]:
    sweep = Sweep("rivals")
    yield from ("## Switch by switch, and rivals", "", sweep.command, "")
    yield from ("YARN's order of kills for all; against CapacityScheduler with a random node, per cent.", "")
    yield from head("scheme", "mean", "p90", "nJCT (geometric mean)", "waste, %")
    base = {"policy": "capacity-random"}
    for policy, text in RIVALS.items():
        found = (change(sweep.against(base, metric, policy=policy)) for metric in (MEAN, P90, NJCT))
        yield row(text, *found, f"{100 * sweep.mean('waste', policy=policy):.1f}")


def claims() -> Iterator[str]:
    """Each claim with the paper's figure, ours, and a verdict; figures stand in the sections below it."""
    pool, rival, acquired = Sweep("persistent"), Sweep("rivals"), Sweep("acquirer-persistent")
    yield from ("## Claim by claim", "")
    yield from (
        "Figures here are those of the sections below, where each has its command, its seeds and its rows. Pool: all",
        "VMs of `persistent.toml`, unless another is named; Fig. 9 and 10: all VMs, then those of at least an hour.",
        "nJCT: geometric mean, per cent.",
        "",
    )
    yield from head("claim", "the paper", "here", "")
    at = {"least_lifetime_s": 0}
    yarn, three, live = ({"policy": name, **at} for name in ("yarn", "yarn-algorithm-3", "yarn-live"))
    shown = [one for one in SHAPE if one[3] is not None]
    met = [one[1] for one in shown if one[3] <= pool.mean(one[0], **yarn) <= one[4]]
    yield row(
        "Fig. 1 and 2, pools",
        "ranges in the section on pools",
        f"{len(met)} of {len(shown)} within: {'; '.join(met)}",
        "partly met",
    )
    for policy, text in (("yarn-algorithm-3", "Algorithm 3, threshold .7"), ("yarn-live", "ours: `live`")):
        cells, nine, ten = [], [], []
        for life in pool.values("least_lifetime_s"):
            base, case, best = ({"least_lifetime_s": life, "policy": who} for who in ("yarn", policy, "yarn-oracle"))
            gap = 100 * (float(np.mean(pool.of(NJCT, **case) / pool.of(NJCT, **best))) - 1)
            less = pool.against(base, NJCT, **case)
            mean, p90 = (pool.against(base, metric, **case) for metric in (MEAN, P90))
            cells.append((f"{change(less)}, {gap:.0f} %", f"{change(mean)}, {change(p90)}"))
            nine.append("met" if less[0] <= 0 and gap <= 13 else "missed")
            ten.append("met" if mean[0] <= -25 and p90[0] <= -20 else "missed")
        claim = f"Fig. 9: nJCT, distance to the Oracle ({text})"
        yield row(claim, "0 to -24 %, within 13 %", "; ".join(one[0] for one in cells), ", ".join(nine))
        claim = f"Fig. 10: mean JCT, p90 ({text})"
        yield row(claim, "-25 to -27, -20 to -44", "; ".join(one[1] for one in cells), ", ".join(ten))
    wastes = [100 * pool.mean("waste", **one) for one in (yarn, three, live)]
    yield row(
        "waste, CapacityScheduler and matcher",
        "20 to 40 % becomes 3 to 20 %",
        f"{wastes[0]:.1f} % becomes {wastes[1]:.1f} % (Algorithm 3), {wastes[2]:.1f} % (`live`)",
        "not comparable: these tasks lose less",
    )
    delay = rival.of("wait_mean_s", policy="paper") - rival.of("wait_mean_s", policy="paper-no-delay")
    added = interval(100 * delay / rival.of(MEAN, policy="paper"))
    word = "met" if added[0] <= 7.5 else "missed"
    yield row("delay adds, of JCT (Algorithm 1)", "0 to 7.5 %", f"{added[0]:+.1f} ± {added[1]:.1f}", word)
    for name, paper, least in (
        ("recent", "8 to 23 % alone", 8),
        ("matcher", "16 to 24 % alone", 16),
        ("matcher-recent", "27 to 32 %", 27),
        ("stability", "(ours: by stability) 8 to 23 % alone", 8),
        ("matcher-stability", "(ours: by stability) 27 to 32 %", 27),
    ):
        found = acquired.against({"policy": "none"}, NJCT, policy=name)
        what = {"recent": "acquirer", "matcher": "matcher `live`"}.get(name, name.replace("-", " and "))
        yield row(f"Fig. 16: {what}", paper, change(found), "met" if -found[0] >= least else "missed")
    ours = rival.against({"policy": "capacity-random"}, MEAN, policy="live")[0]
    for name, figure in (("checkpoint-1-min", "20"), ("checkpoint-2-min", "20"), ("replicas-3", "21")):
        theirs = rival.against({"policy": "capacity-random"}, MEAN, policy=name)
        word = "met" if ours < theirs[0] else "missed"
        if figure == "21" and word == "met" and theirs[0] < -10:
            word = "partly met: replicas gain much"
        yield row(
            f"Fig. {figure}: {name} against `live`, mean",
            "the matcher is better" + (", replicas gain slightly" if figure == "21" else ""),
            f"{change(theirs)} against {ours:+.0f}",
            word,
        )
    base = {"policy": "capacity-random"}
    one, other = (change(rival.against(base, NJCT, policy=name)) for name in ("promises", "equation-3"))
    yield row("Fig. 22: Eq. 1, Eq. 3", "19, 17 % less", f"{one}, {other}", "not comparable: another pool")
    paid = Sweep("costs-persistent")
    spot, regular, plain, both = (
        {"policy": name, "most_task_s": 3600} for name in ("spot", "regular", "harvest", "harvest-live")
    )
    to_spot, to_regular = (paid.against(other, "cost_total", **plain) for other in (spot, regular))
    word = "met" if to_spot[0] <= -40 and to_regular[0] <= -75 else "against regular met, against Spot missed"
    yield row("Fig. 17: cost against Spot, regular", "-40, -75 %", f"{change(to_spot)}, {change(to_regular)}", word)
    saved = [paid.against(plain | at, "cost_total", **(both | at)) for at in ({}, {"most_task_s": 1200})]
    word = ", ".join("met" if one[0] <= -10 else "missed" for one in saved)
    found = ", ".join(map(change, saved))
    yield row("Fig. 17: matcher and acquirer save (tasks to 60, 20 min)", "-14.2 %; aim: -10", found, word)
    faster = [paid.against(spot, NJCT, **case) for case in (plain, both)]
    more = 100 * (paid.mean("cores_paid_mean", **plain) / paid.mean("cores_paid_mean", **spot) - 1)
    word = f"not comparable: harvest pools hold {more:.0f} % more cores"
    yield row("Fig. 18: JCT against Spot, and with the matcher", "-20, -33 %", ", ".join(map(change, faster)), word)
    wind = Sweep("wind")
    found = [
        wind.against({"policy": "capacity-random"} | at, MEAN, **({"policy": "live"} | at))
        for cut in wind.values("power_cut")
        for at in ({"power_cut": cut, "power_from_s": from_s} for from_s in wind.values("power_from_s"))
    ]
    word = "met" if max(one[0] for one in found) <= -15 else "missed"
    yield row("Fig. 19, wind: mean JCT, two days, two cuts", "-15 %", ", ".join(map(change, found)), word)
    yield from ELSEWHERE


_ACQUIRER = "[acquirer.md](../reference/acquirer.md)"
#: Claims that other pages answer, or nothing here.
ELSEWHERE = tuple(
    row(*cells)
    for cells in (
        ("Fig. 12, 14: duration, load", "gains fade below 20 min and at full load", "section on load and duration", ""),
        ("Fig. 11, runtimes", "it always gains, least with little variance", "section on runtimes", ""),
        ("Fig. 15, wrong estimates", "little effect", "section on wrong estimates", "met"),
        ("Fig. 24, a known truth", "most machines are stable in the end", _ACQUIRER, "met"),
        ("Fig. 10: 40 % of jobs over 30 % better", "0 to 15 % worse", "jobs are not kept one by one", "not run"),
        ("Fig. 5 to 8, 13, 23", "", "on Azure, with its own traces", "not run"),
    )
)


#: Sections by the results that they are made of.
SECTIONS = {
    "rivals": rivals,
    "orders": orders,
    "heartbeats": heartbeats,
    "persistent": persistent,
    "acquirer-persistent": acquirer,
    "acquirer-bounds": bounds,
    "acquirer": allocations,
    "costs-persistent": costs,
    "matching": nine,
    "matching-load": loads,
    "runtimes": runtimes,
    "estimates": estimated,
    "calm": calm,
    "wind": wind,
    "calibration": calibration,
    "foresight": foresight,
}


def written(page: str) -> str:
    """The page with the tables in their place."""
    return placed(page, BEGIN, sections(claims, SECTIONS))


if __name__ == "__main__":
    rewrite(PAGE, written, sys.argv[1:])

"""Sections on pools: how they change, who replaces machines, what is paid, calm and windy days."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from kept_results import MEAN, NJCT, P90, Sweep, change, filled, head, row

from matcher_sections.compared import LIFE, aim, compared, more_cores, replaced

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


def _each(sweep: Sweep, *axes: str) -> list[dict[str, Any]]:
    """Every combination of the values of some axes."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*map(sweep.values, axes))]


def _range(changes: list[float]) -> str:
    """From the least to the most, per cent."""
    return f"{round(min(changes)):+d} to {round(max(changes)):+d}"


def _which(least_life_s: float) -> str:
    """Which VMs a pool has."""
    return "all VMs" if not least_life_s else f"VMs of at least {least_life_s / 3600:g} h"


def persistent() -> Iterator[str]:
    sweep = Sweep("persistent")
    lives = sweep.values("least_lifetime_s")
    yield from ("## Pools like the paper's", "", sweep.command, "")
    yield from (
        "On-demand VMs go to the fullest of ten servers drawn, batches stay together, two threads a core; means over",
        "seeds.",
        "",
    )
    titles = [_which(life) for life in lives]
    yield from head("", "the paper (C1 to C6)", *titles, "")
    for name, text, paper, least, most in SHAPE:
        found = [sweep.mean(name, policy="yarn", least_lifetime_s=life) for life in lives]
        word = "not comparable"
        if least is not None:
            word = "met" if all(least <= value <= most for value in found) else "missed by one or both"
        yield row(text, paper, *(f"{value:.2f}" if value < 2 else f"{value:.0f}" for value in found), word)
    yield from ("", "Completion times there, mean and p90 against a random node in the same order, per cent:", "")
    yield from head("scheme", *titles)
    shown = (
        ("yarn-filling", "yarn", "YARN's order: filling, YARN's default"),
        ("yarn-least-loaded", "yarn", "YARN's order: the least loaded node"),
        ("yarn-worst-fit", "yarn", "YARN's order: worst fit"),
        ("yarn-algorithm-3", "yarn", "YARN's order: Algorithm 3, threshold .7"),
        ("yarn-live", "yarn", "YARN's order: `live`"),
        ("yarn-oracle", "yarn", "YARN's order: the paper's Oracle"),
        ("random", "yarn", "a manager's order alone, against YARN's"),
        ("filling", "random", "a manager's order: filling"),
        ("least-loaded", "random", "a manager's order: the least loaded node"),
        ("worst-fit", "random", "a manager's order: worst fit"),
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
        text = f"Of the Oracle's gain over the same order, {titles[number]}: mean {shares[0]}, p90 {shares[1]}: {word}."
        yield filled(text)


def mixed() -> Iterator[str]:
    sweep = Sweep("mixed")
    lives = sweep.values("least_lifetime_s")
    yield from ("## Interruptible jobs among others (Fig. 23)", "", sweep.command, "")
    yield from (
        "Half of the jobs save their work every minute at no cost. Against CapacityScheduler, each kind by itself;",
        "geometric mean of nJCT, per cent; then what is wasted of all work. The paper: uninterruptible jobs gain as",
        "without the others, and of interruptible ones there is no difference worth the name.",
        "",
    )
    titles = [_which(life) for life in lives]
    columns = [f"{title}, {kind}" for title in titles for kind in ("interruptible", "uninterruptible", "waste, %")]
    yield from head("scheme", *columns)
    shown = (
        ("capacity-filling", "filling"),
        ("capacity-worst-fit", "worst fit"),
        ("paper-heartbeat", "Algorithm 3, threshold .7"),
        ("live", "`live`"),
    )
    for policy, text in shown:
        cells = []
        for life in lives:
            base = {"policy": "capacity-random", "least_lifetime_s": life}
            case = base | {"policy": policy}
            for kind in ("interruptible", "uninterruptible"):
                cells.append(change(sweep.against(base, f"{kind}_jct_geometric_mean_s", **case)))
            cells.append(f"{100 * sweep.mean('waste', **case):.1f} (was {100 * sweep.mean('waste', **base):.1f})")
        yield row(text, *cells)


def acquirer() -> Iterator[str]:
    sweep = Sweep("acquirer-persistent")
    yield from ("## The acquirer where servers persist (Fig. 16)", "", sweep.command, "")
    more = [more_cores(sweep, {"policy": "none"}, policy=name) for name in sweep.values("policy") if name != "none"]
    yield filled(
        "Against CapacityScheduler (random node) without replacement; geometric mean of nJCT, p90, per cent. The "
        "paper: 8 to 23 % by the acquirer alone, 16 to 24 % by the matcher alone, 27 to 32 % by both. All are asked to "
        f"hold as many cores; paid for, also while machines leave, are {_range(more)} % from the first job on, against "
        "the pool of which nothing is replaced."
    )
    yield ""
    yield from replaced(
        sweep,
        ("none", "nothing is replaced"),
        ("filling", "filling of the node that reports instead of a random one"),
        ("worst-fit", "the node with the most idle cores instead of a random one (worst fit)"),
        ("worst-fit-recent", "it, and the most recently changed (Algorithm 2)"),
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
        ("lossless", "nothing is replaced, but a kill costs no work, and its task goes ahead of all"),
    )
    found = [sweep.against({"policy": "none"}, NJCT, policy=policy) for policy in ("future", "future-half", "lossless")]
    most = max(half - mean for mean, half in found)
    more = max(more_cores(sweep, {"policy": "none"}, policy=policy) for policy in ("future", "future-half"))
    word = "no rule gains" if most < 8 else "a rule may gain"
    yield ""
    yield filled(
        f"Who knows the future gains at most {most:.0f} % (upper ends of the intervals) although up to {more:.0f} % "
        f"more cores are paid for, and so does a pool on which kills cost nothing: {word} the 8 % that are asked of "
        "the acquirer alone on these pools."
    )


COSTS = {
    "spot": "Spot, CapacityScheduler",
    "spot-4": "Spot, up to four on a server, CapacityScheduler",
    "harvest": "harvest, CapacityScheduler",
    "harvest-filling": "harvest, filling",
    "harvest-filling-recent": "harvest, filling and acquirer (Algorithm 2)",
    "harvest-worst-fit": "harvest, worst fit",
    "harvest-worst-fit-recent": "harvest, worst fit and acquirer (Algorithm 2)",
    "harvest-live": "harvest, `live` and acquirer (Algorithm 2)",
    "harvest-live-stability": "harvest, `live` and acquirer (by stability)",
    "lossless": "harvest, CapacityScheduler, but a kill costs no work, and its task goes ahead of all",
    "regular": "regular, CapacityScheduler",
}

#: Of pools so small that a tenth of their machines is none: Algorithm 2 only says which is given back.
SMALL = COSTS | {
    "harvest-filling-recent": "harvest, filling; when there are too many the most recently changed goes",
    "harvest-worst-fit-recent": "harvest, worst fit; when there are too many the most recently changed goes",
    "harvest-live": "harvest, `live`; when there are too many the most recently changed goes",
}


#: What pools of harvest VMs are compared with.
HARVEST = {
    "harvest": "harvest alone",
    "harvest-filling": "it, filling",
    "harvest-filling-recent": "it, filling, the most recently changed goes",
    "harvest-worst-fit-recent": "it, worst fit, the most recently changed goes",
}


def _none_replaced(sweep: Sweep) -> str:
    """A paragraph on pools in which Algorithm 2 replaces none."""
    cases = [case for case in _each(sweep, *_axes(sweep)) if case["policy"] in ("harvest", "harvest-live")]
    machines = [
        sweep.mean("cores_paid_mean", **one)
        * sweep.mean("machines_held_mean", **one)
        / sweep.mean("cores_held_mean", **one)
        for one in cases
    ]
    if max(machines) >= 10:
        raise ValueError("a tenth of these pools is a machine: Algorithm 2 replaces some")
    count = " to ".join(dict.fromkeys(f"{one:.0f}" for one in (min(machines), max(machines))))
    return filled(
        "**The acquirer hardly ever replaces a machine here**: of some "
        f"{count} harvest VMs in the mean a tenth, rounded down, is none (Algorithm "
        "2). It says which machine is given back when there are too many: the most recently changed instead of a "
        "random one. What `live` saves against harvest alone, or against filling, is the matcher's and that rule's "
        "together. Filling and worst fit with the same rule differ from `live` by the matcher alone: the last two "
        "columns of costs."
    )


def _axes(sweep: Sweep) -> list[str]:
    return ["policy", *(name for name in ("most_task_s", "others_share") if name in sweep.kept["cases"][0])]


def costs() -> Iterator[str]:
    sweep = Sweep("costs-persistent")
    yield from ("## Costs where servers persist (Fig. 17 and 18)", "", sweep.command, "")
    yield from (
        "Jobs come for 24 hours, once and four times as often in turn, six hours each; pools of one kind, scaled",
        "hourly to 60 to 80 % of their cores; YARN's order of kills for all. Costs in core-hours of a regular VM, from",
        "the first job until the last is done: a pool that loses more work is paid for longer, and that is part of its",
        "cost. Changes in per cent, seed by seed; nJCT: ratio of geometric means. The paper: harvest VMs 40 % cheaper",
        "than Spot VMs and 75 % than regular ones, completion times 20 % below Spot's, with matcher and acquirer 33 %,",
        "and these save 14.2 % of the cost.",
        "",
        _none_replaced(sweep),
        "",
    )
    against = {"spot": "Spot", "regular": "regular"} | HARVEST
    yield from head("tasks up to", "pool", *_titles(against))
    for longest in sweep.values("most_task_s"):
        yield from _paid(sweep, f"{longest / 60:.0f} min", SMALL, tuple(against), most_task_s=longest)


def others() -> Iterator[str]:
    sweep = Sweep("costs-others")
    yield from ("## Costs where others want what is left, too (Fig. 17)", "", sweep.command, "")
    yield from (
        "As above, with tasks up to 20 min and up to four Spot VMs of ours on a server. Others want a share of what",
        "on-demand VMs leave, as Spot VMs of 2 to 8 cores that stay two hours in the mean: a harvest VM shrinks for",
        "them, a Spot VM of ours does not. Work is a share of what is left then.",
        "",
        _none_replaced(sweep),
        "",
    )
    against = {"spot": "Spot"} | HARVEST
    yield from head("others want", "pool", *_titles(against))
    shown = {name: text for name, text in SMALL.items() if name in sweep.values("policy")}
    for share in sweep.values("others_share"):
        yield from _paid(sweep, f"{100 * share:.0f} %", shown, tuple(against), others_share=share)


def _titles(against: dict[str, str]) -> Iterator[str]:
    """Of the columns of `_paid`."""
    for number, text in enumerate(against.values()):
        yield f"against {text}" if number else f"cost, against {text}"
    yield from (f"nJCT against {next(iter(against.values()))}", "waste, %", "utilisation, %", "cores paid")


def _paid(sweep: Sweep, at: str, pools: dict[str, str], against: tuple[str, ...], **case: float) -> Iterator[str]:
    """Costs of each pool against those of some, the first of which is Spot's."""
    for policy, text in pools.items():
        mine = {"policy": policy, **case}
        yield row(
            at,
            text,
            *(change(sweep.against({"policy": other, **case}, "cost_total", **mine)) for other in against),
            change(sweep.against({"policy": against[0], **case}, NJCT, **mine)),
            f"{100 * sweep.mean('waste', **mine):.1f}",
            f"{100 * sweep.mean('utilisation', **mine):.0f}",
            f"{sweep.mean('cores_paid_mean', **mine):.0f}",
        )


def equal() -> Iterator[str]:
    sweep = Sweep("costs-equal")
    yield from ("## Spot and harvest VMs of as many cores (Fig. 18)", "", sweep.command, "")
    more = [
        more_cores(sweep, {LIFE: life, "policy": name}, policy="spot", **{LIFE: life})
        for life in sweep.values(LIFE)
        for name in sweep.values("policy")
        if name != "spot"
    ]
    yield filled(
        "The acquirer keeps the cores near a budget, whatever the work, which is the same for all. Harvest VMs are "
        "large and grow, so Spot VMs get a budget by which as many cores are paid for from the first job on: the pools "
        f"differ by at most {max(map(abs, more)):.1f} %. YARN's order of kills for all. Against Spot VMs, per cent; "
        "the paper: harvest VMs 20 % below them, with matcher and acquirer 33 %."
    )
    yield ""
    cells = ("nJCT", "mean", "p90", "waste, %", "failed attempts a task")
    cells += ("cores paid from the first job on", "machines, whole run", "evicted")
    yield from head("", "pool", *cells)
    for life in sweep.values("least_lifetime_s"):
        for policy, text in COSTS.items():
            if policy not in sweep.values("policy"):
                continue
            case, spot = ({"least_lifetime_s": life, "policy": name} for name in (policy, "spot"))
            yield row(
                _which(life),
                text.replace("Spot,", "Spot, up to eight on a server,"),
                *(change(sweep.against(spot, metric, **case)) for metric in (NJCT, MEAN, P90)),
                f"{100 * sweep.mean('waste', **case):.1f}",
                f"{sweep.mean('kills_per_task', **case):.2f}",
                f"{sweep.mean('cores_paid_mean', **case):.0f}",
                f"{sweep.mean('machines_held_mean', **case):.0f}",
                f"{sweep.mean('machines_evicted', **case):.0f}",
            )


def allocations() -> Iterator[str]:
    sweep = Sweep("acquirer")
    yield from ("## The acquirer where all servers are alike", "", sweep.command, "")
    more = [
        more_cores(sweep, at | {"replaced_share": 0.0}, **at, replaced_share=0.1)
        for at in _each(sweep, "allocation", "policy")
    ]
    yield filled(
        "Against CapacityScheduler (random node) without replacement in the same order of kills, a manager's; "
        "geometric mean of nJCT, p90, per cent; waste. On-demand VMs are placed at random. By how the provider places "
        "harvest VMs; replaced is the tenth that changed last, each hour (Algorithm 2). From the first job on a pool "
        f"with the acquirer is paid for {_range(more)} % of cores, also while machines leave, against the one without "
        "(last column: random node)."
    )
    yield ""
    schemes = {
        "capacity-random": "random node",
        "capacity-filling": "filling",
        "capacity-worst-fit": "worst fit",
        "landmark": "landmarks",
        "live": "`live`",
    }
    titles = [f"{name}{text}" for name in schemes.values() for text in ("", ", and the acquirer")]
    yield from head("allocation", *titles, "cores paid without, with the acquirer")
    for allocation in sweep.values("allocation"):
        base = {"allocation": allocation, "policy": "capacity-random", "replaced_share": 0.0}
        cells = []
        for policy in schemes:
            for share in sweep.values("replaced_share"):
                case = {"allocation": allocation, "policy": policy, "replaced_share": share}
                cells.append(compared(sweep, base, (NJCT, P90), **case))
        held = [sweep.mean("cores_paid_mean", **base | {"replaced_share": share}) for share in (0.0, 0.1)]
        yield row(allocation, *cells, f"{held[0]:.0f}, {held[1]:.0f}")


CALM = {
    "capacity-filling": "filling of the node that reports",
    "capacity-least-loaded": "the least loaded node",
    "capacity-worst-fit": "worst fit",
    "paper": "Algorithm 1, completed intervals",
    "sized": "Eq. 1, and the size of shrinks",
    "landmark": "landmarks",
    "live": "`live`",
    "oracle-no-kill": "Oracle, no shrink that kills",
}


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

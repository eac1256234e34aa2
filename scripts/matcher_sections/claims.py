"""The section of all claims, with the papers' figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from kept_results import MEAN, NJCT, P90, Sweep, change, head, interval, row

from matcher_sections.compared import LIFE, more_cores
from matcher_sections.plain import PLAIN, best_rule
from matcher_sections.pools import SHAPE


def _ratios(pool: Sweep, at: dict[str, Any], base: str, policy: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of each job of all seeds, its completion time against the same job's under another policy."""
    ours, theirs = (
        np.concatenate([np.array(seed, float) for seed in pool.jobs(policy=name, **at)]) for name in (policy, base)
    )
    found: np.ndarray[Any, np.dtype[np.float64]] = ours / theirs
    return found


def _stable(pool: Sweep, minutes: int, **case: Any) -> float:
    """Of the median pool; one without a figure is one on which no time is long enough."""
    return float(np.median(np.nan_to_num(pool.of(f"pool_stable_for_{minutes}_min", **case), nan=np.inf)))


def claims() -> Iterator[str]:
    """Each claim with the paper's figure, ours, and a verdict; figures stand in the sections below it."""
    pool, rival, acquired = Sweep("persistent"), Sweep("rivals"), Sweep("acquirer-persistent")
    yield from ("## Claim by claim", "")
    yield from (
        "Figures here are those of the sections below, where each has its command, its seeds and its rows. Pool: all",
        "VMs of `persistent.toml`, unless another is named; Fig. 9 and 10: all VMs, then those of at least an hour.",
        "nJCT: geometric mean, per cent. Met: the mean over seeds is at least as good as the paper's figure, or as",
        "near as the row says. The paper's CapacityScheduler is one with a random node here, unless filling, YARN's",
        "default, is named: the paper does not say which it ran.",
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
    schemes = (("yarn-algorithm-3", "Algorithm 3, threshold .7"), ("yarn-live", "ours: `live`"))
    for plain, (policy, text) in itertools.product(("yarn", "yarn-filling"), schemes):
        cells, nine, ten = [], [], []
        for life in pool.values("least_lifetime_s"):
            base, case, best = ({"least_lifetime_s": life, "policy": who} for who in (plain, policy, "yarn-oracle"))
            gap, half = interval(100 * (pool.of(NJCT, **case) / pool.of(NJCT, **best) - 1))
            less = pool.against(base, NJCT, **case)
            mean, p90 = (pool.against(base, metric, **case) for metric in (MEAN, P90))
            cells.append((f"{change(less)}, {gap:.0f} ± {half:.0f} %", f"{change(mean, 1)}, {change(p90, 1)}"))
            nine.append("met" if less[0] <= 0 and gap <= 13 else "missed")
            ten.append("met" if mean[0] <= -25 and p90[0] <= -20 else "missed")
        text += ", against filling" if plain == "yarn-filling" else ""
        claim = f"Fig. 9: nJCT, distance to the Oracle ({text})"
        yield row(claim, "0 to -24 %, within 13 %", "; ".join(one[0] for one in cells), ", ".join(nine))
        claim = f"Fig. 10: mean JCT, p90 ({text})"
        yield row(claim, "-25 to -27, -20 to -44", "; ".join(one[1] for one in cells), ", ".join(ten))
        ratios = [_ratios(pool, {LIFE: life}, plain, policy) for life in pool.values(LIFE)]
        found = "; ".join(f"{100 * (one <= 0.7).mean():.0f} %, {100 * (one > 1.0).mean():.0f} %" for one in ratios)
        word = ", ".join(
            "met" if (one <= 0.7).mean() >= 0.4 and (one > 1).mean() <= 0.15 else "missed" for one in ratios
        )
        yield row(f"Fig. 10: jobs over 30 % better, worse ({text})", "40 %, 0 to 15 %", found, word)
    slowed, failed = (pool.of(metric, **yarn) for metric in ("slowdown_geometric_mean", "kills_per_task"))
    yield row(
        "Fig. 5a: slowdown of jobs, CapacityScheduler (geometric mean); of jobs, more than 4 times",
        "1.5; some",
        f"{slowed.mean():.2f} ± {interval(slowed)[1]:.2f}; {100 * pool.mean('slowed_4_share', **yarn):.1f} %",
        "met" if slowed.mean() >= 1.5 else "met within the interval" if sum(interval(slowed)) >= 1.5 else "missed",
    )
    yield row(
        "Fig. 5b: failed attempts a task; work lost",
        "0.5; 20 %",
        f"{failed.mean():.2f} ± {interval(failed)[1]:.2f}; {100 * pool.mean('waste', **yarn):.1f} %",
        "met" if failed.mean() >= 0.5 else "missed",
    )
    at_lives = [{"policy": "yarn", LIFE: life} for life in pool.values(LIFE)]
    drifts = [pool.mean("pool_gap_drift", **one) for one in at_lives]
    claim = "Fig. 7: how far the gaps of six hours are spread otherwise than all (Kolmogorov)"
    yield row(claim, "slightly", ", ".join(f"{one:.2f}" for one in drifts), "no figure")
    ages = [_stable(pool, minutes, **one) for one in at_lives for minutes in (30, 60)]
    claim = "Fig. 13: for how many durations (30, 60 min) a machine must be stable to be 70 % sure (median pool)"
    off = [f"{one:.1f}" for one in ages if abs(one - 2.6) > 0.5]
    word = f"missed by {', '.join(off)} (more than .5 off)" if off else "met"
    yield row(claim, "about 2.6", ", ".join(f"{one:.1f}" for one in ages), word)
    wastes = [100 * pool.mean("waste", **one) for one in (yarn, three, live)]
    yield row(
        "waste, CapacityScheduler and matcher",
        "20 to 40 % becomes 3 to 20 %",
        f"{wastes[0]:.1f} % becomes {wastes[1]:.1f} % (Algorithm 3), {wastes[2]:.1f} % (`live`)",
        "not comparable: these tasks lose less",
    )
    waited = rival.against({"policy": "paper-no-delay"}, MEAN, policy="paper")
    word = "met" if waited[0] <= 0 else "missed: it makes jobs slower"
    yield row("Fig. 10: what waiting gains (Algorithm 1 with delay, and without)", "0 to -7.5 %", change(waited), word)
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
    for name, figure in (("checkpoint-1-min", "20"), ("checkpoint-2-min", "20"), ("replicas-3", "21")):
        found = [rival.against({"policy": name}, NJCT, policy=policy) for policy in ("paper-heartbeat", "live")]
        words = ["not told apart" if abs(one) <= half else "met" if one < 0 else "missed" for one, half in found]
        theirs, ours = (rival.against({"policy": "capacity-worst-fit"}, NJCT, policy=one) for one in (name, "live"))
        yield row(
            f"Fig. {figure}: nJCT against {name} on random nodes: Algorithm 3, `live`",
            "the matcher is better",
            f"{', '.join(map(change, found))} (against worst fit alone {name} has {change(theirs, 1)}, `live` "
            f"{change(ours, 1)})",
            f"{', '.join(words)}: only where {name} places at random; with worst fit it was not run",
        )
    alone = rival.against({"policy": "capacity-random"}, NJCT, policy="replicas-3")
    word = "met" if alone[0] > -10 else "missed: they gain much"
    yield row("Fig. 21: nJCT of three replicas", "slightly less", change(alone), word)
    base = {"policy": "capacity-random"}
    one, other = (change(rival.against(base, NJCT, policy=name)) for name in ("promises", "equation-3"))
    yield row("Fig. 22: Eq. 1, Eq. 3", "19, 17 % less", f"{one}, {other}", "not comparable: another pool")
    yield from _costs()
    held = Sweep("costs-equal")
    spot = {"policy": "spot", LIFE: 0}
    plain, both = (held.against(spot, NJCT, policy=name, **{LIFE: 0}) for name in ("harvest", "harvest-live"))
    word = ", ".join("met" if one[0] <= paper else "missed" for one, paper in ((plain, -20), (both, -33)))
    more = [more_cores(held, {"policy": name, LIFE: 0}, **spot) for name in ("harvest", "harvest-live")]
    word += f"; cores of the pools differ by at most {max(map(abs, more)):.1f} %"
    claim = "Fig. 18: JCT against Spot VMs of as many cores, and with the matcher"
    yield row(claim, "-20, -33 %", f"{change(plain)}, {change(both)}", word)
    mixed = Sweep("mixed")
    for policy, text in (("paper-heartbeat", "Algorithm 3"), ("live", "ours: `live`")):
        for kind, paper in (("interruptible", "no difference"), ("uninterruptible", "less")):
            metric = f"{kind}_jct_geometric_mean_s"
            changes = [
                mixed.against({"policy": "capacity-random", LIFE: life}, metric, policy=policy, **{LIFE: life})
                for life in mixed.values(LIFE)
            ]
            same = kind == "interruptible"
            words = (_no_difference(one) if same else _less(one) for one in changes)
            claim = f"Fig. 23: nJCT of {kind} jobs ({text}{f'; met: at most {SAME:g} % apart' if same else ''})"
            yield row(claim, paper, ", ".join(map(change, changes)), ", ".join(words))
    wind = Sweep("wind")
    found = [
        wind.against({"policy": "capacity-random"} | at, MEAN, **({"policy": "live"} | at))
        for cut in wind.values("power_cut")
        for at in ({"power_cut": cut, "power_from_s": from_s} for from_s in wind.values("power_from_s"))
    ]
    word = "not comparable: another trace, and days that were chosen"
    yield row("Fig. 19, wind: mean JCT, two days, two cuts", "-15 %", ", ".join(map(change, found)), word)
    yield from _workloads()
    yield from ELSEWHERE


#: Per cent: mean completion times so far apart count as no difference, and so much longer ones as little effect.
SAME, LITTLE = 2.0, 5.0


def _no_difference(found: tuple[float, float]) -> str:
    one, half = found
    return "met" if abs(one) <= SAME else "not told apart" if abs(one) <= half else "missed"


def _less(found: tuple[float, float]) -> str:
    one, half = found
    return "met" if one + half < 0 else "not told apart" if one - half <= 0 else "missed"


#: What `live` with Algorithm 2 is compared with: each row leaves fewer differences between the two.
_BASES = {
    "harvest": "a random node; a random machine goes",
    "harvest-filling": "filling; a random machine goes",
    "harvest-filling-recent": "filling; the most recently changed goes: the matcher alone",
    "harvest-worst-fit-recent": "worst fit; the most recently changed goes: the matcher alone",
}


def _costs() -> Iterator[str]:
    """Fig. 17: what harvest VMs cost against others, and what the matcher saves of that."""
    paid = Sweep("costs-persistent")
    lengths = [{"most_task_s": most_s} for most_s in (3600, 1200)]
    of_kind = {
        kind: [paid.against({"policy": kind} | at, "cost_total", policy="harvest", **at) for at in lengths]
        for kind in ("spot", "spot-4", "regular")
    }
    cells = [", ".join(map(change, found)) for found in of_kind.values()]
    words = [", ".join("met" if one[0] <= -40 else "missed" for one in of_kind[kind]) for kind in ("spot", "spot-4")]
    # The price of harvest VMs was chosen so that it is a quarter.
    words.append("not shown: by the choice of price")
    words[0] += " as they ran, but not like for like in cores: the paper has about as many, as full"
    cells[0] += f" (a core-hour: {', '.join(_a_core(paid, at) for at in lengths)})"
    pools = (("harvest", "harvest"), ("spot", "one Spot VM on a server"), ("spot-4", "up to four"))
    held = "; ".join(f"{text} {', '.join(_held(paid, kind, at) for at in lengths)}" for kind, text in pools)
    claim = "Fig. 17: cost against Spot, one on a server, and up to four; regular (tasks to 60, 20 min each)"
    yield row(claim, "-40, -40, -75 %", f"{'; '.join(cells)}. Cores paid, how full: {held}", "; ".join(words))
    wanted = Sweep("costs-others")
    shares = [{"others_share": share} for share in wanted.values("others_share") if share]
    for sweep, places, text, paper in (
        (paid, lengths, "tasks to 60, 20 min", "-14.2 %; aim: -10"),
        (wanted, shares, "where others want 25, 50 % of what is left, tasks to 20 min", "no figure; aim: -10"),
    ):
        for base, against in _BASES.items():
            saved, slowed = (
                [sweep.against({"policy": base} | at, metric, policy="harvest-live", **at) for at in places]
                for metric in ("cost_total", NJCT)
            )
            claim = f"Fig. 17: cost; nJCT of `live`, the most recently changed goes ({text}), against {against}"
            found = f"{', '.join(map(change, saved))}; {', '.join(map(change, slowed))}"
            word = ", ".join(
                "met" if one <= -14.2 else "missed, the aim met by the mean" if one <= -10 else "missed"
                for one, _ in saved
            )
            if all(abs(one) <= half for one, half in saved):
                word += ": no saving is told apart from nothing"
            yield row(claim, paper, found, word)


def _held(sweep: Sweep, policy: str, at: dict[str, Any]) -> str:
    case = {"policy": policy, **at}
    return f"{sweep.mean('cores_paid_mean', **case):.0f}, {100 * sweep.mean('utilisation', **case):.0f} %"


def _a_core(sweep: Sweep, at: dict[str, Any]) -> str:
    """What a core-hour of a harvest VM costs against one of a Spot VM; per cent, by the means."""
    ours, theirs = (
        sweep.mean("cost_total", policy=kind, **at) / sweep.mean("core_h_paid", policy=kind, **at)
        for kind in ("harvest", "spot")
    )
    return f"{100 * (ours / theirs - 1):+.0f}"


def _workloads() -> Iterator[str]:
    """Claims on durations, loads, the shape of runtimes and wrong estimates."""
    for rules, against in ((PLAIN[:1], ""), (PLAIN, ", against the best of the rules that predict nothing")):
        yield from _by_duration(rules, against)
        yield from _by_shape(rules, against)
    said = Sweep("estimates")
    right = {"policy": "live", "estimate_factor": 1.0, "estimate_error": 0.0}
    cases = [
        said.against(right, MEAN, policy="live", estimate_factor=factor, estimate_error=error)
        for factor in said.values("estimate_factor")
        for error in said.values("estimate_error")
        if (factor, error) != (1.0, 0.0)
    ]
    worse = [mean for mean, _ in cases if mean > LITTLE]
    told = sorted(one for one in cases if one[0] > one[1])
    found = f"{min(cases)[0]:+.0f} to {max(cases)[0]:+.0f}"
    word = f"met but for {len(worse)} of {len(cases)} ({max(worse):+.0f} %)" if worse else f"met by all of {len(cases)}"
    if told:
        word += f"; slower, told apart from nothing: {len(told)} ({', '.join(map(change, told))})"
    claim = f"Fig. 15: mean JCT with wrong estimates, against right ones (`live`; met: at most {LITTLE:g} % slower)"
    yield row(claim, "little effect", found, word)


def _by_duration(rules: Sequence[str], against: str) -> Iterator[str]:
    loads = Sweep("matching-load")
    by_length: dict[int, list[float]] = {}
    for most_s in (1200, 3600):
        by_length[most_s] = [
            loads.against(best_rule(loads, at, rules)[1], MEAN, policy="live", **at)[0]
            for at in ({"load": load, "most_task_s": most_s} for load in loads.values("load"))
        ]
    cells = [
        f"{', '.join(f'{gain:+.0f}' for gain in gains)} (to {most_s // 60} min)" for most_s, gains in by_length.items()
    ]
    found = f"{'; '.join(cells)}; loads {', '.join(map(str, loads.values('load')))}"
    fades = all(short > long for short, long in zip(by_length[1200], by_length[3600], strict=True))
    word = f"short tasks: {'met' if fades else 'missed'}; full load not run"
    claim = f"Fig. 12, 14: mean JCT by duration and load (`live`{against})"
    yield row(claim, "gains fade below 20 min and at full load", found, word)


def _by_shape(rules: Sequence[str], against: str) -> Iterator[str]:
    shapes = Sweep("runtimes")
    by_policy = {
        policy: [
            shapes.against(best_rule(shapes, {"shape": shape}, rules)[1], MEAN, policy=policy, shape=shape)
            for shape in ("uniform", "gaussian", "pareto")
        ]
        for policy in ("paper-heartbeat", "live")
    }
    found = "; ".join(", ".join(f"{one:+.0f}" for one, _ in gains) for gains in by_policy.values())
    every = [one for gains in by_policy.values() for one in gains]
    unsure = sum(one + half >= 0 for one, half in every)
    always = "met" if not unsure else f"met but for {unsure} of {len(every)}, not told apart from nothing"
    if any(one - half > 0 for one, half in every):
        always = "missed"
    less = [
        name
        for name, place in (("uniform", 0), ("Pareto", 2))
        if any(gains[place][0] >= gains[1][0] for gains in by_policy.values())
    ]
    more = f"missed by {' and '.join(less)}" if less else "met"
    word = f"it gains: {always}; more with much variance: {more}"
    claim = f"Fig. 11: mean JCT, uniform, Gaussian, Pareto runtimes (Algorithm 3; `live`{against})"
    yield row(claim, "it gains, and more where they vary much (uniform, Pareto)", found, word)


_ACQUIRER = "[acquirer.md](../reference/acquirer.md)"

#: Claims that other pages answer, or nothing here.
ELSEWHERE = tuple(
    row(*cells)
    for cells in (
        ("Fig. 24, a known truth", "most machines are stable in the end", _ACQUIRER, "met"),
        ("Fig. 6, 8", "", "drawings, of no measurement", "no claim"),
    )
)

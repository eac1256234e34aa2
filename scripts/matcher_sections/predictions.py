"""Sections on what is predicted: runtimes, estimates, calibration, and what could be known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kept_results import MEAN, P90, Sweep, change, filled, head, of_sums, part, row

from matcher_sections.compared import compared
from matcher_sections.plain import PLAIN, RULES


def runtimes() -> Iterator[str]:
    sweep = Sweep("runtimes")
    yield from ("## How runtimes are distributed (Fig. 11)", "", sweep.command, "")
    yield from (
        "All VMs of the pool that persists, YARN's order of kills for all, against a random node; mean, p90, per",
        "cent; waste. All runtimes have a mean of 30.5 min: U[1, 60] min, Gaussian between the same, and Pareto of",
        "shape 1.1 between bounds that are as many times apart, 8 min and 8 h.",
        "",
    )
    policies = (*PLAIN[1:], "paper-heartbeat", "live", "oracle-no-shrink")
    titles = (*RULES[1:], "Algorithm 3, completed intervals, threshold .7", "`live`", "the paper's Oracle")
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
        "estimates; mean against a random node, filling and worst fit in the same order, which ask for none. A task of",
        "which nothing is said counts as one of half an hour (`fallback_s`, 1800 s), which is about the mean of these",
        "tasks (1830 s): that row does not show how the matcher does where such a guess is wrong.",
        "",
    )
    bases = ("against a random node", "against filling", "against worst fit")
    yield from head("said", "`live`, against right estimates", *bases, "waste, %")
    right = {"estimate_factor": 1.0, "estimate_error": 0.0}

    def one(text: str, **case: Any) -> str:
        found = ", ".join(change(sweep.against({"policy": "live", **right}, metric, **case)) for metric in (MEAN, P90))
        plain = (
            change(sweep.against({"policy": base, **right}, MEAN, **case))
            for base in ("capacity-random", "capacity-filling", "capacity-worst-fit")
        )
        return row(text, found, *plain, f"{100 * sweep.mean('waste', **case):.1f}")

    for factor in sweep.values("estimate_factor"):
        for error in sweep.values("estimate_error"):
            words = "as long" if factor == 1 else f"{factor:g} times as long"
            text = words + (f", off by up to {100 * error:.0f} %" if error else "")
            yield one(text, policy="live", estimate_factor=factor, estimate_error=error)
    yield one("nothing of any task", policy="live-nothing-said", **right)


def deciles(sweep: Sweep, kind: str, **case: Any) -> list[tuple[float, float, float]]:
    """Of each decile how many outcomes there are; observed less predicted in points, and half of its interval over
    pools, of which one loss of cores is in many outcomes.
    """
    found = []
    for decile in range(10):
        count, predicted, observed = (
            sweep.of(f"calibration_{kind}_{decile}_{what}", **case) for what in ("count", "predicted", "observed")
        )
        # Without any one of the pools something must be left to compare.
        error, half = of_sums(observed - predicted, count) if (count > 0).sum() > 1 else (math.nan, math.nan)
        found.append((float(count.sum()), 100.0 * error, 100.0 * half))
    return found


def calibrated(found: list[tuple[float, float, float]]) -> str:
    """Whether what is said is at most 5 points off in every decile of 200 outcomes or more."""
    known = [(abs(error), half) for count, error, half in found if count >= 200]
    if any(error - half > 5 for error, half in known):
        return "missed"
    return "met" if all(error + half <= 5 for error, half in known) else "not told"


def calibration() -> Iterator[str]:
    sweep = Sweep("calibration")
    yield from ("## Calibration of the live default", "", sweep.command, "")
    yield from (
        "Observed less predicted, in points, by decile of what was predicted, all seeds together; below 0 too much is",
        "promised. - : fewer than 200 outcomes. Tasks: those that `live` starts. Machines: all, every 15 minutes, for",
        "10 min to 2 h and 0, 2 and 6 cores left free, so that one loss of cores is in up to a hundred outcomes; ± is",
        "half of the 95 % interval over the ten pools (jackknife). Later: from day 6 on instead of 4.25. The aim is at",
        "most 5 points in every decile: missed, where the interval of one is beyond, and not told, where one reaches",
        "beyond.",
        "",
    )
    yield from head("pool, VMs of at least", "of", "outcomes", *(f".{one}" for one in range(10)), "worst", "")
    for case in sweep.kept["cases"]:
        at = {name: case[name] for name in ("policy", "least_lifetime_s")}
        for kind, text in (("started", "tasks"), ("machines", "machines")):
            found = deciles(sweep, kind, **at)
            cells = ("-" if count < 200 else change((error, half), 1) for count, error, half in found)
            yield row(
                f"{at['policy']}, {at['least_lifetime_s'] / 60:.0f} min",
                text,
                f"{sum(count for count, *_ in found):.0f}",
                *cells,
                f"{max(abs(error) for count, error, _ in found if count >= 200):.1f}",
                calibrated(found),
            )
    for run, why in sweep.kept.get("failed", {}).items():
        yield from ("", f"Left out is `{run}`:", f"of one seed {why}.")


def foresight() -> Iterator[str]:
    sweep = Sweep("foresight")
    yield from ("## What could be known", "", sweep.command, "")
    yield from (
        "Every half hour a machine is picked for a task that leaves 0, 2 or 6 cores free, for 10 min to 2 h: how",
        "often it keeps the room, per cent. Who knows the VMs to come knows each that will come and go, and not which",
        "server it goes to: three other draws of the same VMs say how many servers with as many cores keep the room.",
        "Last columns: the part of what who knows all is better than anyone, that the others have; mean squared",
        "errors of the two predictions. All by the means over pools; no intervals are kept.",
        "",
    )
    cells = ("anyone", "`live`", "knows the VMs to come", "both", "knows all", "`live` has", "both have", "errors")
    yield from head("pool", *cells)
    for name_of in sweep.values("policy"):
        names = ("random", "predicted", "known", "both", "best")
        picked = {name: 100 * sweep.mean(f"picked_{name}", policy=name_of) for name in names}
        parts = [
            (picked[name] - picked["random"]) / (picked["best"] - picked["random"]) for name in ("predicted", "both")
        ]
        errors = (sweep.mean(f"picks_{name}_brier", policy=name_of) for name in ("predicted", "known"))
        yield row(
            name_of,
            *(f"{value:.1f}" for value in picked.values()),
            *(f"{value:.2f}" for value in parts),
            ", ".join(f"{value:.3f}" for value in errors),
        )


def known() -> Iterator[str]:
    sweep = Sweep("known")
    yield from ("## Knowing the VMs to come", "", sweep.command, "")
    yield filled(
        "All VMs, a manager's order of kills for all; 50 jobs, onto machines that are empty, so that over a run at "
        "a load of .9 the pool is about half full. Who knows the VMs to come (as above) says of machines of a "
        "class of cores how long their room lasts, instead of what was seen of machines, and as the mean of both; "
        "all else is `live`. That is more than anybody can know, and one way to use it: no bound on what a "
        "prediction can gain. Mean and p90 against a random node in the same order, per cent, and parts of the "
        "Oracle's gain; the aim is .75 and .60."
    )
    yield ""
    parts = ("`live` has", "knows the VMs to come", "both")
    yield from head("pool", "Oracle", "`live`", "knows the VMs to come", "both", *parts)
    for name in dict.fromkeys(str(one).rpartition(": ")[0] for one in sweep.values("policy")):
        base, live, knows, both, best = (
            {"policy": f"{name}: {policy}"}
            for policy in ("capacity-random", "live", "known", "live-known", "oracle-no-kill")
        )
        yield row(
            name,
            *(
                ", ".join(change(sweep.against(base, metric, **one)) for metric in (MEAN, P90))
                for one in (best, live, knows, both)
            ),
            *(
                ", ".join(part(sweep.share(base, best, metric, **one)) for metric in (MEAN, P90))
                for one in (live, knows, both)
            ),
        )

"""The section on rules that predict nothing, beside the matcher: a random node, filling, least loaded, worst fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kept_results import MEAN, P90, Sweep, change, filled, head, row

from matcher_sections.compared import LIFE, aim

#: A case of a sweep: a pool in words, and who is meant by each of the rules, `live` and the Oracle there.
Case = tuple[str, Sweep, dict[str, Any], tuple[str, ...]]
RULES = ("a random node", "filling", "least loaded", "worst fit")
PLAIN = ("capacity-random", "capacity-filling", "capacity-least-loaded", "capacity-worst-fit")
LIVE = (*PLAIN, "live", "oracle-no-kill")
YARN = (*PLAIN, "live", "oracle-no-shrink")
#: The Oracle loses no task: where killed ones wait is nothing to it.
ORACLE_OF_ORDERS = "oracle-newest-submission"


def cases() -> Iterator[Case]:
    """All pools on which the rules, the matcher and an Oracle were run."""
    sweep = Sweep("persistent")
    for life in sweep.values(LIFE):
        text = f"persistent, VMs of at least {life / 60:.0f} min"
        yield text, sweep, {LIFE: life}, ("random", "filling", "least-loaded", "worst-fit", "live", "oracle")
        who = ("yarn", "yarn-filling", "yarn-least-loaded", "yarn-worst-fit", "yarn-live", "yarn-oracle")
        yield f"{text}, YARN's order", sweep, {LIFE: life}, who
    sweep = Sweep("matching-load")
    for load in sweep.values("load"):
        for most_s in sweep.values("most_task_s"):
            at = {"load": load, "most_task_s": most_s}
            yield f"persistent, load {load:g}, tasks to {most_s / 60:.0f} min", sweep, at, LIVE
    sweep = Sweep("matching")
    for packing in sweep.values("packing"):
        for life in sweep.values(LIFE):
            yield f"{packing}, VMs of at least {life / 60:.0f} min", sweep, {"packing": packing, LIFE: life}, LIVE
    sweep = Sweep("orders")
    orders = {"oldest-tail": "oldest, to the end", "newest-tail": "newest, to the end"}
    orders |= {"least-lost-submission": "least work lost, by submission"}
    for packing in sweep.values("packing"):
        for order, text in orders.items():
            rules = (f"{rule}-{order}" for rule in ("random", "filling", "least-loaded", "worst-fit"))
            yield f"{packing}, {text}", sweep, {"packing": packing}, (*rules, f"live-{order}", ORACLE_OF_ORDERS)
    sweep = Sweep("runtimes")
    for shape in sweep.values("shape"):
        yield f"persistent, {shape} runtimes, YARN's order", sweep, {"shape": shape}, YARN
    sweep = Sweep("drawn-lives")
    for name in dict.fromkeys(str(one).rpartition(": ")[0] for one in sweep.values("policy")):
        yield name, sweep, {}, tuple(f"{name}: {policy}" for policy in LIVE)
    sweep = Sweep("calm")
    for packing in sweep.values("packing"):
        yield f"calm, {packing}", sweep, {"packing": packing}, LIVE
    sweep = Sweep("wind")
    for cut in sweep.values("power_cut"):
        for from_s in sweep.values("power_from_s"):
            at = {"power_cut": cut, "power_from_s": from_s}
            yield f"wind, day {from_s / 86400:.0f}, cut {'evenly' if cut == 'even' else 'by servers'}", sweep, at, LIVE


def best_rule(sweep: Sweep, at: dict[str, Any], rules: Sequence[str] = PLAIN) -> tuple[str, dict[str, Any]]:
    """Of rules that predict nothing the one by which jobs take the least time in the mean: in words, and its case."""
    each = {text: at | {"policy": name} for text, name in zip(RULES, rules, strict=False)}
    return min(each.items(), key=lambda one: sweep.mean(MEAN, **one[1]))


def plain() -> Iterator[str]:
    """Each pool: the rules, what matcher and Oracle gain over the best, and whether the aim holds against it."""
    yield from ("## Against the best of the rules that predict nothing", "")
    yield filled(
        "YARN's default fills the node that reports until nothing more fits, and the Oracle fills, too. Slurm's `LLN` "
        "takes the node with the largest share of idle CPUs: where all nodes have as many, that with the fewest cores "
        "in use (least loaded), or with the most idle cores (worst fit) where the cores that a machine lost count as "
        "in use. A random node spreads a job over many machines. So not all that is gained over a random node, in the "
        "other sections, is the prediction's. Here is what is left of it: the other rules against a random node in "
        "the same order of kills; which of the four has the shortest completion times in the mean over seeds; then "
        "`live` and the Oracle against that one, and the aim with it in the random node's place. Mean, p90, per cent. "
        "The best is chosen by the figure that is then compared, which is in its favour. Rows are of the experiments "
        "of the sections below, which have their commands; orders are a manager's where none is named. Beside "
        "checkpoints and replicas, with wrong estimates, with an acquirer and with jobs that save their work worst fit "
        "stands in their sections."
    )
    yield ""
    shares = ("of its gain: mean", "p90", "")
    yield from head(
        "pool", *RULES[1:], "the best", "waste, %", "`live` against it", "waste, %", "Oracle against it", *shares
    )
    for text, sweep, at, (*rules, lives, oracle) in cases():
        random, *others, live, knows = (at | {"policy": name} for name in (*rules, lives, oracle))
        word, base = best_rule(sweep, at, rules)
        told, verdict = aim(sweep, base, live, knows)
        yield row(
            text,
            *(_both(sweep, random, other) for other in others),
            word,
            f"{100 * sweep.mean('waste', **base):.1f}",
            _both(sweep, base, live),
            f"{100 * sweep.mean('waste', **live):.1f}",
            _both(sweep, base, knows),
            *told,
            verdict,
        )


def _both(sweep: Sweep, base: dict[str, Any], case: dict[str, Any]) -> str:
    """Changes of the mean and the p90 of completion times."""
    return ", ".join(change(sweep.against(base, metric, **case)) for metric in (MEAN, P90))

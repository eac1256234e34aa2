"""The section on filling, which needs no prediction and which YARN does by default, beside the matcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kept_results import MEAN, P90, Sweep, change, head, row

from matcher_sections.compared import LIFE, aim

#: A case of a sweep: a pool in words, and who is meant by a random node, filling, `live` and the Oracle there.
Case = tuple[str, Sweep, dict[str, Any], tuple[str, str, str, str]]
PLAIN = ("capacity-random", "capacity-filling", "live", "oracle-no-kill")
YARN = ("capacity-random", "capacity-filling", "live", "oracle-no-shrink")


def cases() -> Iterator[Case]:
    """All pools on which filling, the matcher and an Oracle were run; what has no Oracle has filling in its section."""
    sweep = Sweep("persistent")
    for life in sweep.values(LIFE):
        text = f"persistent, VMs of at least {life / 60:.0f} min"
        yield text, sweep, {LIFE: life}, ("random", "filling", "live", "oracle")
        yield f"{text}, YARN's order", sweep, {LIFE: life}, ("yarn", "yarn-filling", "yarn-live", "yarn-oracle")
    sweep = Sweep("matching-load")
    for load in sweep.values("load"):
        for most_s in sweep.values("most_task_s"):
            at = {"load": load, "most_task_s": most_s}
            yield f"persistent, load {load:g}, tasks to {most_s / 60:.0f} min", sweep, at, PLAIN
    sweep = Sweep("matching")
    for packing in sweep.values("packing"):
        for life in sweep.values(LIFE):
            yield f"{packing}, VMs of at least {life / 60:.0f} min", sweep, {"packing": packing, LIFE: life}, PLAIN
    sweep = Sweep("orders")
    orders = {"oldest-tail": "oldest, to the end", "newest-tail": "newest, to the end"}
    orders |= {"least-lost-submission": "least work lost, by submission"}
    for packing in sweep.values("packing"):
        for order, text in orders.items():
            who = (f"random-{order}", f"filling-{order}", f"live-{order}", "oracle-newest-submission")
            yield f"{packing}, {text}", sweep, {"packing": packing}, who
    sweep = Sweep("runtimes")
    for shape in sweep.values("shape"):
        yield f"persistent, {shape} runtimes, YARN's order", sweep, {"shape": shape}, YARN
    sweep = Sweep("drawn-lives")
    for name in dict.fromkeys(str(one).rpartition(": ")[0] for one in sweep.values("policy")):
        random, fills, live, best = (f"{name}: {policy}" for policy in PLAIN)
        yield name, sweep, {}, (random, fills, live, best)
    sweep = Sweep("calm")
    for packing in sweep.values("packing"):
        yield f"calm, {packing}", sweep, {"packing": packing}, PLAIN
    sweep = Sweep("wind")
    for cut in sweep.values("power_cut"):
        for from_s in sweep.values("power_from_s"):
            at = {"power_cut": cut, "power_from_s": from_s}
            yield f"wind, day {from_s / 86400:.0f}, cut {'evenly' if cut == 'even' else 'by servers'}", sweep, at, PLAIN


def filling() -> Iterator[str]:
    """Each pool: filling, what the matcher and the Oracle gain over it, and whether the aim holds against it."""
    yield from ("## Against filling, which predicts nothing", "")
    yield from (
        "YARN's default fills the node that reports until nothing more fits, and the Oracle fills, too; a random node",
        "spreads a job over many machines. So not all that is gained over a random node, in the other sections, is the",
        "prediction's.",
        "Here is what is left: filling against a random node in the same order of kills, then `live` and the Oracle",
        "against filling, and the aim with filling in the random node's place. Mean, p90, per cent; waste by filling",
        "and by `live`. Rows are of the experiments of the sections below, which have their commands; orders are a",
        "manager's where none is named. Pools with jobs that save their work, with an acquirer, and of costs were run",
        "without an Oracle: filling stands in their sections.",
        "",
    )
    shares = ("of its gain: mean", "p90", "")
    yield from head("pool", "filling", "waste, %", "`live` against it", "waste, %", "Oracle against it", *shares)
    for text, sweep, at, who in cases():
        random, fills, live, best = (at | {"policy": name} for name in who)
        told, word = aim(sweep, fills, live, best)
        yield row(
            text,
            _both(sweep, random, fills),
            f"{100 * sweep.mean('waste', **fills):.1f}",
            _both(sweep, fills, live),
            f"{100 * sweep.mean('waste', **live):.1f}",
            _both(sweep, fills, best),
            *told,
            word,
        )


def _both(sweep: Sweep, base: dict[str, Any], case: dict[str, Any]) -> str:
    """Changes of the mean and the p90 of completion times."""
    return ", ".join(change(sweep.against(base, metric, **case)) for metric in (MEAN, P90))

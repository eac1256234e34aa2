"""Sections on orders of kills, on heartbeats, on rivals, and on load and duration."""

from __future__ import annotations

from collections.abc import Iterator

from kept_results import MEAN, NJCT, P90, Sweep, change, filled, head, row

from matcher_sections.compared import HOW_FULL, aim, beside, compared, gains, how_full
from matcher_sections.plain import ORACLE_OF_ORDERS


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
    words |= {"newest-submission": "newest, by submission", "least-lost-submission": "least work lost, by submission"}
    for packing in sweep.values("packing"):
        yarn = {"packing": packing, "policy": "random-oldest-tail"}
        for order, text in words.items():
            base, live = ({"packing": packing, "policy": f"{who}-{order}"} for who in ("random", "live"))
            best = {"packing": packing, "policy": ORACLE_OF_ORDERS}
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
        base = {"packing": packing, "policy": "random-newest-submission"}
        sized = {"packing": packing, "policy": "sized-newest-submission"}
        found = [change(sweep.against(base, metric, **sized)) for metric in (MEAN, P90)]
        yield f"* {packing}, newest, by submission, by Eq. 1 with sizes instead of landmarks: {', '.join(found)}."


HEARTBEATS = {
    "capacity-random": "CapacityScheduler, random node",
    "capacity-filling": "CapacityScheduler, filling of the node that reports",
    "capacity-least-loaded": "the node with the fewest cores in use (Slurm's `LLN`)",
    "capacity-worst-fit": "the node with the most idle cores (`LLN` where lost cores count as in use)",
    "algorithm-1": "Algorithm 1, completed intervals",
    "oracle-no-shrink": "the paper's Oracle (no shrink at all)",
} | {
    f"{key}-{threshold}": f"Algorithm 3, {text}, threshold {threshold / 100:g}"
    for key, text in (
        ("algorithm-3", "completed intervals"),
        ("censored-3", "running intervals"),
        ("sized-3", "running intervals and sizes"),
    )
    for threshold in (30, 50, 70, 80, 90)
}


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


RIVALS = {
    "capacity-filling": "CapacityScheduler, filling of the node that reports (YARN's default)",
    "capacity-worst-fit": "worst fit: the node with the most idle cores",
    "checkpoint-1-min": "CapacityScheduler with a random node, checkpoints of 1 min every 10 (Fig. 20)",
    "checkpoint-2-min": "CapacityScheduler with a random node, checkpoints of 2 min every 10 (Fig. 20)",
    "replicas-3": "CapacityScheduler with a random node, three replicas (Fig. 21)",
    "paper": "Algorithm 1, Eq. 1, completed intervals",
    "paper-no-delay": "the same without delay",
    "paper-heartbeat": "Algorithm 3, Eq. 1, completed intervals, threshold .7",
    "censored": "Algorithm 1, Eq. 1, running intervals too",
    "promises": "and promises",
    "equation-3": "the same by Eq. 3 (Fig. 22)",
    "sized": "Eq. 1, and the size of shrinks",
    "landmark": "landmarks",
    "live": "`live`: landmarks, `patience`, `escalation`, `spread` and `releases`",
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
    yield ""
    text = ""
    for rule, word in (("capacity-filling", "filling"), ("capacity-worst-fit", "worst fit")):
        saved = (
            f"{name} {change(sweep.against({'policy': rule}, NJCT, policy=name), 1)}"
            for name in ("checkpoint-1-min", "checkpoint-2-min", "replicas-3", "live")
        )
        text += f"nJCT against {word} alone, per cent: {', '.join(saved)}. "
    yield filled(f"{text}Neither was run with checkpoints or replicas.")


def loads() -> Iterator[str]:
    settings = Sweep("matching-load").kept["settings"]
    window_h, edge_h = settings["window_h"], settings["edge_h"]
    yield from ("## Load and duration (Fig. 12 and 14)", "")
    yield filled(
        f"Jobs come for {window_h:g} hours, as many as make the load; those of the {window_h - 2 * edge_h:g} hours in "
        "the middle are measured, and what is done in these hours, so that all rows are of the same hours of the trace "
        "and of machines that are neither empty yet nor empty again."
    )
    yield ""
    yield from gains("matching-load", ("load", "most_task_s"), "load, tasks up to")


def nine() -> Iterator[str]:
    yield from ("## Nine pools (Fig. 9)", "")
    yield from gains("matching", ("packing", "least_lifetime_s"), "pool, VMs of at least")


def drawn() -> Iterator[str]:
    sweep = Sweep("drawn-lives")
    yield from ("## Where all VMs leave in time, on fewer servers", "", sweep.command, "")
    yield from (
        'All VMs. Pools and jobs as in "Nine pools" and "Load and duration", but on three quarters of the servers (150',
        "of 200, 172 of 230): fuller, as pools here were before lives were drawn.",
        "",
        HOW_FULL,
        "",
    )
    of_pool = ("mean gap, min", "mean change, cores", "jobs come for, h", "cores at work, %", "a task waits, s")
    yield from head("pool", *of_pool, "waste, %", "`live`", "waste, %", "Oracle", "of its gain: mean", "p90", "")
    for name in dict.fromkeys(str(one).rpartition(": ")[0] for one in sweep.values("policy")):
        base, live, best = ({"policy": f"{name}: {policy}"} for policy in ("capacity-random", "live", "oracle-no-kill"))
        pool = (f"{sweep.mean(metric, **base):.0f}" for metric in ("pool_gap_mean_min", "pool_change_mean_cores"))
        yield row(name, *pool, *how_full(sweep, base, best), *beside(sweep, base, live, best))

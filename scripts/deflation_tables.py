"""Writes docs/research/deflation.md's figures: the paper of Sharma et al. 2019 claim by claim, and Fig. 8c and 8d.

``deflation_tables.py [RESULTS...]``: directories that ``ebb sim run`` wrote are first kept in experiments/results; what
benchmarks found is read from benchmarks/results.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kept_results import ROOT, Sweep, begin, filled, head, interval, measured, part, placed, rewrite, row, sections

PAGE = ROOT / "docs" / "research" / "deflation.md"
BEGIN = begin("deflation_tables.py")
RESULTS = ROOT / "benchmarks" / "results"

#: The paper's figures (004): hits with the application to those without, at half of the memory (Fig. 5c); total of both
#: rates (8a); seconds to take half of 100 GB (8b).
HITS, TOTAL, DEFLATED_S = 6.0, 1.8, 100.0
#: 64 VMs that are deflated in less than a tenth of the time that they would take one after the other are so at once.
AT_ONCE = 6.4
#: Preempted are so few of all that "negligible" holds, per cent; bound below which minimums leave room.
NEGLIGIBLE, ROOM = 1.0, 1.0
#: Hosted overcommitments that differ by no more count as similar (Fig. 8d).
SIMILAR = 0.01
#: Who gives slots up keeps the full quota for as long at the most (benchmarks/engines/spark_host.py); runs of Spark
#: that differ by less are not told apart.
GRACE_S = 30.0
#: Of one workload an invocation whose undeflated run is longer than another's by more was disturbed.
DISTURBED = 1.1
ALIKE = "not told apart"
#: Of every sweep's figures.
DRAWN = "; means ± half of the 95 % interval of coins, times and lives that are drawn (the tenants are the same in all "
DRAWN += "seeds), per cent"
#: Of the sweep of Fig. 8c, what stands in the page.
METRICS = ("low_preempted_share", "low_rejected_share", "high_rejected_share")
METRICS += ("hosted_overcommitment", "offered_overcommitment_mean", "low_throughput", "nodes")


#: Of `levels`.
LEVELS = (("hypervisor", "of_full"), ("both", "of_full"), ("guest", "reached"))


class Benchmark:
    """What a benchmark found."""

    def __init__(self, name: str) -> None:
        self.name = name
        path = RESULTS / f"{name}.json"
        self.figures = measured(path)
        made = json.loads(path.read_text(encoding="utf-8"))
        # Runs that are kept one by one are of more than one day.
        days = dict.fromkeys(date[:10] for date in (made.get("since"), made["date"]) if date)
        self.when = f"{' to '.join(days)}, {made['version']}"

    def value(self, key: str) -> float:
        return float(self.figures[key]["value"])

    def text(self, key: str, digits: int = 2, scale: float = 1.0) -> str:
        """The median, and the least and the most of the runs."""
        found = self.figures[key]
        low, high = min(found["runs"]) * scale, max(found["runs"]) * scale
        return f"{found['value'] * scale:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    def runs(self, key: str) -> list[float]:
        return [float(run) for run in self.figures[key]["runs"]]

    @property
    def command(self) -> str:
        """Of the column that says by what, when and by which version it was measured."""
        return f"`{self.name}`, {self.when}"


def claims() -> Iterator[str]:
    """Each claim of the paper, its figure, ours and a verdict."""
    yield from ("## Claim by claim", "")
    yield from (
        "Here: medians of five or more runs, least and most in brackets, by `make bench NAME=` and the name in the",
        "fourth column; means over seeds where that is `ebb sim run`. The paper has VMs of 4 cores and 16 GB under",
        "KVM; here are two cores and emulated guests, for Fig. 1, 5c, 5d, 6 and 7 none but control groups and",
        "processes, so of times only ratios compare. Spark: one run each, which tell",
        "no more than directions, by `python -m benchmarks spark --runs 1 --output benchmarks/results --part NAME`",
        "([parts](benchmarks.md#spark)).",
        "",
    )
    yield from head("claim", "the paper", "here", "measured by", "")
    all_three = Benchmark("together")
    busy = "jvm_cores" in all_three.figures
    requests = "JVM, of its requests" if busy else "JVM, of 800 requests/s"
    names = {"memcached": "memcached", "jvm": requests, "jvm_response": "JVM, of its response time"}
    names |= {"compile": "compile"}
    # What a load of a fixed rate keeps says nothing where it hardly uses what is taken.
    kept = [all_three.value(f"{name}_50") for name in names if name != "jvm"]
    load = "it used 3 % of a core and none of the memory taken"
    if busy:
        load = f"it uses {all_three.value('jvm_cores'):.2f} of a core undeflated; with a lighter load it keeps more"
    yield row(
        "Fig. 1: half of CPU, memory and I/O taken together",
        "four applications lose less than 30 % in many cases",
        "; ".join(f"{words} keeps {all_three.text(f'{name}_50')}" for name, words in names.items()),
        all_three.command,
        f"met by {sum(value >= 0.7 for value in kept)} of {len(kept)} (the JVM by its response time; {load}), in "
        "control groups; Spark is left out",
    )
    yield row(
        "Table 1: memcached, JVM, web servers and Spark give resources themselves",
        "own changes to each",
        "ready adapters for all four, their programs unchanged",
        "",
        "met ([adapters](../reference/adapters.md))",
    )
    yield _levels()
    yield from _cpu()
    yield _shrunk()
    jvm = Benchmark("jvm")
    mean = "follows_to_stays_50_mean"
    yield row(
        "Fig. 5d: response time of a JVM whose heap follows, at high levels",
        "20 % better",
        f"at 50 % {jvm.text(mean)} with heap and cache that follow, of that where neither does",
        jvm.command,
        f"direction {'met' if jvm.value(mean) <= 0.8 else 'missed'} by heap and cache together, not by the heap alone, "
        "and by this load, not by every one (benchmarks.md); size not comparable: memory only, and a swap of its own",
    )
    yield from _spark()
    yield from _host()
    if (ROOT / "experiments/results/fig8c-minimums.json").exists():
        yield from _cluster()


def _shrunk() -> str:
    hits = Benchmark("memcached")
    native = "application_to_hypervisor_zipf_4k_50_native"
    # What is fetched was measured at 5,000 reads/s only; with the application nothing is read from that disk.
    fetched, swapped = "application_zipf_4k_50_5000_stores_served_s", "hypervisor_zipf_4k_50_native_hits_s"
    paid = [one / other for one, other in zip(hits.runs(fetched), hits.runs(swapped), strict=True)]
    median = statistics.median(paid)
    return row(
        "Fig. 5c: hits of memcached that shrinks its cache, to one that is swapped, at 50 %",
        f"{HITS:g} times",
        f"{hits.text(native, 1)} where a miss costs nothing; {median:.1f} ({min(paid):.1f} to {max(paid):.1f}) where "
        "misses are fetched in 2 ms (from two windows of a run); disk of 5,000 reads/s "
        f"{hits.text('application_to_hypervisor_zipf_4k_50_5000', 1)}",
        hits.command,
        f"{_word(hits.value(native) >= HITS)} where a miss costs nothing, {_word(median >= HITS)} where misses are "
        "fetched; of memcached's footprint, not of a VM; in control groups, not in a guest; against the hypervisor's "
        "limit alone, where the paper has hypervisor and OS",
    )


def _cpu() -> Iterator[str]:
    found = Benchmark("cpu")
    yield row(
        "Fig. 5b: a parallel compile with less CPU",
        "OS level up to 22 % better than the hypervisor's; both: 30 % less at 75 %",
        f"at 75 % {found.text('quota_75')} times as long by quota, {found.text('both_75')} by both"
        + (f"; {once}" if (once := _once(found)) else ""),
        found.command,
        "not comparable: four emulated vCPUs on two cores are slower than one or two, also undeflated (both at 50 %: "
        f"{found.text('both_50')})",
    )


def _once(found: Benchmark) -> str:
    """What is to be known of two ways that come to one setting."""
    one, other = (found.figures[f"{way}_75"] for way in ("off_lining", "both"))
    if one["of"] != other["of"]:
        return ""
    twice = "" if one["runs"] == other["runs"] else ", measured twice"
    return f"at 75 % CPUs off line and both are one setting{twice}"


def _levels() -> str:
    claim = "Fig. 5a: hits of memcached with less memory, the application not asked"
    paper = "at 50 % 20 % less by the hypervisor; OS level better up to 40 %, then killed; both together the better one"
    if not (RESULTS / "levels.json").exists():
        return row(claim, paper, "", "`levels`", "not run yet (benchmarks.md)")
    found = Benchmark("levels")
    alone, both, reached = (found.text(f"{name}_50_{what}") for name, what in LEVELS)
    better = found.value("both_to_hypervisor_50") > 1
    return row(
        claim,
        paper,
        f"at 50 % keeps {alone} by the hypervisor, {both} by both; unplugging alone reaches {reached} of it",
        found.command,
        f"{'both together: met' if better else 'missed: both are no better'}; unplugging stops at "
        f"{30 * found.value('guest_30_reached'):.0f} %, the paper's guest is better up to 40 %: missed",
    )


def _spark() -> Iterator[str]:
    """Each row as soon as its runs are there; what the paper trains with BigDL is synchronous SGD here."""
    found = Benchmark("spark") if (RESULTS / "spark.json").exists() else None
    rows: tuple[tuple[str, str, str, Callable[[Benchmark], str]], ...] = (
        (
            "Fig. 6a: Spark's ALS deflated by half, half way",
            "1.5 times as long by VM level, 2.2 self, 2.5 preempted",
            "als_50_at_50_{} vm self preemption",
            _als,
        ),
        (
            "Fig. 6b: K-means, by 25 and 50 %",
            "1.18 and 1.38 times as long by itself, less than by VM level",
            "kmeans_{} 25_at_50_self 25_at_50_vm 50_at_50_self 50_at_50_vm",
            _kmeans,
        ),
        (
            "Fig. 6c, 6d: CNN, RNN at 50 %",
            "20 and 25 % longer by VM level; with preemption twice and 1.33 times as long as that",
            "sgd_50_at_50_{} vm self preemption",
            lambda spark: "not comparable: one hidden layer in their place, CPU only",
        ),
        (
            "Fig. 7a: ALS deflated earlier or later",
            "self is faster until 30 % of the job are done",
            "als_{} 50_at_25_self 50_at_25_vm 50_at_75_self 50_at_75_vm",
            _earlier,
        ),
        (
            "Fig. 7b: CNN's throughput at 50 %",
            "20 % less; 20 % more than with preemption",
            "sgd_50_at_50_{}_rate vm preemption",
            lambda spark: "not comparable: one hidden layer in its place, CPU only",
        ),
    )
    for claim, paper, keys, verdict in rows:
        pattern, *words = keys.split()
        names = [pattern.format(word) for word in words]
        if found is None or not set(names) <= set(found.figures):
            yield row(claim, paper, "", "`spark`", "not run yet (benchmarks.md)")
            continue
        # A run takes ten minutes and more, so there may be one only.
        once = all(len(found.figures[n]["runs"]) == 1 for n in names)
        values = [f"{found.value(n):.2f}" if once else found.text(n) for n in names]
        here = "; ".join(_named_run(word, value) for word, value in zip(words, values, strict=True))
        said = verdict(found)
        yield row(claim, paper, here, found.command, f"{said}, one run each" if once else said)


def _named_run(word: str, value: str) -> str:
    """`50_at_75_self` and the like in words."""
    share, _, rest = word.partition("_at_")
    at, _, way = rest.partition("_")
    return f"{share} %{'' if at == '50' else f' at {at} % of the stages'}, {way} {value}" if rest else f"{word} {value}"


def _slower(spark: Benchmark, one: str, other: str) -> str:
    """Whether the claim is met that a way is the slower one, if that can be told."""
    least = GRACE_S / min(spark.runs(f"{one.partition('_')[0]}_undeflated_s"))
    further = spark.value(one) - spark.value(other)
    return _word(further > 0) if abs(further) >= least else ALIKE


def _grace(*verdicts: str) -> str:
    """Why ways are not told apart, where some are not."""
    return f" (less than the {GRACE_S:g} s for which self may keep the full quota)" if ALIKE in verdicts else ""


def _als(spark: Benchmark) -> str:
    own, vm, gone = (f"als_50_at_50_{way}" for way in ("self", "vm", "preemption"))
    last, slower = _slower(spark, gone, max(own, vm, key=spark.value)), _slower(spark, own, vm)
    return f"preemption slowest: {last}; self slower than VM level: {slower}{_grace(last, slower)}; CPU only"


def _kmeans(spark: Benchmark) -> str:
    quarter, half = (_slower(spark, f"kmeans_{d}_at_50_vm", f"kmeans_{d}_at_50_self") for d in (25, 50))
    return f"less by itself: at 25 % {quarter}, at 50 % {half}{_grace(quarter, half)}; CPU only"


def _earlier(spark: Benchmark) -> str:
    """Which way is faster early and late; nothing where times are relative to a run that was disturbed."""
    undeflated_s = spark.runs("als_undeflated_s")
    if max(undeflated_s) > DISTURBED * min(undeflated_s):
        return (
            "not comparable until it is measured again: the invocation was disturbed (undeflated "
            f"{max(undeflated_s):.0f} s, in another {min(undeflated_s):.0f} s); CPU only"
        )
    early = _slower(spark, "als_50_at_25_vm", "als_50_at_25_self")
    late = _slower(spark, "als_50_at_75_self", "als_50_at_75_vm")
    said = f"self faster early: {early}, slower late: {late}{_grace(early, late)}"
    # Points of two invocations have none.
    if early == late == _word(True) and "als_crossover" in spark.figures:
        crossing = spark.value("als_crossover")
        said += f"; as long at {crossing:.2f}, for 30 %: {_word(0.2 <= crossing <= 0.4)}"
    return f"{said}; CPU only"


def _word(met: bool) -> str:
    return "met" if met else "missed"


def _host() -> Iterator[str]:
    found = Benchmark("throughput")
    undeflated = "total_to_undeflated"
    beside = (
        f"{found.text(undeflated)} of what both give undeflated"
        if undeflated in found.figures
        else "beside both undeflated not measured yet"
    )
    yield row(
        "Fig. 8a: memcached beside a batch VM deflated by half, sum of both rates",
        f"{TOTAL:g}; the batch job loses 20 %",
        f"{found.text('total')}; the batch job keeps {found.text('batch_deflated_together')}; {beside}",
        found.command,
        f"{'met' if found.value('total') >= TOTAL else 'missed'}: a loop bound by CPU, which leaves no room; 1.5 is "
        "what the sizes alone give",
    )
    found = Benchmark("latency")
    size = found.figures["with_application_50_s"]["of"].split("a VM of ")[1].split(" MiB")[0]
    yield row(
        "Fig. 8b: half of the memory of a VM of 100 GB, with the application",
        f"under {DEFLATED_S:g} s",
        f"{found.text('with_application_50_s', 0)} s, a VM of {size} MiB",
        found.command,
        "not comparable: a smaller VM",
    )
    ratio = "without_to_with_50"
    here = f"{found.text(ratio)} times" if ratio in found.figures else "one of them did not get there"
    word = "met" if ratio in found.figures and found.value(ratio) >= 2 else "missed"
    yield row("Fig. 8b: the same without the application", "2 to 3 times as long", here, found.command, word)
    found = Benchmark("cascade")
    yield row(
        "§5, §6.3: the VMs of a host are deflated at once",
        "concurrent",
        f"64 VMs of a make-believe libvirt take {found.text('side_by_side_64_vms')} of the time of one; two real "
        f"guests, each with a core of its own, {found.text('two_vms_apart_to_one')}; on two cores that they share "
        f"{found.text('two_vms_to_one')}",
        found.command,
        f"make-believe, whose calls take no CPU: {_word(found.value('side_by_side_64_vms') < AT_ONCE)} (under "
        f"{AT_ONCE:g}, where one after the other is 64), our aim (1.5) "
        f"{_word(found.value('side_by_side_64_vms') <= 1.5)}; two real guests: one after the other is 2; with a core "
        f"each our aim (1.15) {_word(found.value('two_vms_apart_to_one') <= 1.15)}; on shared ones their own CPU time "
        f"alone is {found.text('two_vms_least_to_one')}",
    )


# --- benchmarks ------------------------------------------------------------------------------------------------------


def guests() -> Iterator[str]:
    """What a guest gave with less CPU, and memcached with less memory."""
    found = Benchmark("cpu")
    yield from (
        "## CPU by layer (Fig. 5b)",
        "",
        "`make bench NAME=cpu`: times as long as undeflated in the same run. The columns do not tell how good a way of",
        "taking is ([why](benchmarks.md#cpu)).",
        "",
    )
    yield from head("CPU taken", "quota", "CPUs off line", "both")
    for share in (25, 50, 75):
        yield row(f"{share} %", *(found.text(f"{way}_{share}") for way in ("quota", "off_lining", "both")))
    if once := _once(found):
        yield from ("", f"A{once[1:]}.")
    yield ""
    yield from _hits()


def _hits() -> Iterator[str]:
    found = Benchmark("memcached")
    yield from (
        "## Memcached with its application (Fig. 5c)",
        "",
        "`make bench NAME=memcached`: hits with the application to those by the hypervisor's limit alone, in pairs,",
        "by the reads a second that the disk gives; 4 kB values, Zipf .99.",
        "",
    )
    reads = {"native": "as the disk is", "10000": "10,000", "5000": "5,000", "500": "500"}
    yield from head("memory left", *reads.values(), "misses stored, 5,000", "hit ratio", "ideal LRU")
    for share in (75, 50, 37, 25):
        key = f"application_to_hypervisor_zipf_4k_{share}"
        ratios = [found.text(f"{key}_{cap}", 1) for cap in (*reads, "5000_stores")]
        ratio, ideal = (found.value(f"application_zipf_4k_{share}_5000_{what}") for what in ("hit_ratio", "ideal_lru"))
        yield row(f"{share} %", *ratios, f"{ratio:.3f}", f"{ideal:.3f}")
    other = [found.text(f"application_to_hypervisor_{kind}_50_5000", 1) for kind in ("zipf_1k", "uniform_4k")]
    kept = [found.text(f"application_zipf_4k_50_5000{which}_of_full") for which in ("", "_stores")]
    here, there = (
        found.value("hypervisor_zipf_4k_50_native_of_full"),
        Benchmark("levels").value("hypervisor_50_of_full"),
    )
    yield from (
        "",
        f"At 50 % and 5,000 reads/s: 1 kB values {other[0]}, uniform keys {other[1]}. With the application",
        f"{kept[0]} of the rate at full size is kept, {kept[1]} where misses are fetched and stored;",
        "nothing is swapped in. The rate at full size is one window of 1.5 s and moves from one to the next, so that",
        "shares of it can be above 1. 50 % are of memcached's footprint; in Fig. 5a they are of a VM of which",
        f"memcached holds half: the limit alone keeps {here:.2f} of the rate here and {there:.2f} there, so that the",
        f"application could gain some {100 * (1 / there - 1):.0f} % there at the most. Misses are paid for in one",
        "column only, in the others the application's go to no backend.",
        "",
        f"1 GiB is taken in {found.text('shrink_seconds', 1)} s, with a p99 of single gets of",
        f"{found.text('shrink_during_get_p99_ms', 1)} ms meanwhile, {found.text('shrink_idle_get_p99_ms', 1)} ms idle.",
    )


# --- the cluster -----------------------------------------------------------------------------------------------------


def bound(case: dict[str, Any]) -> float:
    """What the minimums of a case alone take of the cluster at its peak."""
    low, least = case["low_share"], case["minimum_share"]
    return float(case["overcommitment"] * (1 - low + low * least))


def percent(sweep: Sweep, metric: str, case: dict[str, Any]) -> str:
    return part(interval(100.0 * sweep.of(metric, **case)))


def cases(sweep: Sweep, **fixed: Any) -> Iterator[dict[str, Any]]:
    """Cases with these values, in order."""
    for low in sweep.values("low_share"):
        for least in sweep.values("minimum_share"):
            for over in sweep.values("overcommitment"):
                case = {"low_share": low, "minimum_share": least, "overcommitment": over}
                if all(case[name] == value for name, value in fixed.items()):
                    yield case


def preempted(sweep: Sweep, case: dict[str, Any]) -> float:
    return 100.0 * sweep.mean("low_preempted_share", **case)


def alone(case: dict[str, Any]) -> dict[str, Any]:
    """The case of preemption only beside it; minimums mean nothing there."""
    return case | {"minimum_share": 0}


def _cluster() -> Iterator[str]:
    sweep = Sweep("fig8c-minimums")
    at = list(cases(sweep))
    room = [case for case in at if bound(case) < ROOM]
    few = [case for case in room if preempted(sweep, case) < NEGLIGIBLE]
    none = [case for case in room if not preempted(sweep, case)]
    most = max(preempted(sweep, case) for case in room)
    offered = sweep.mean("offered_overcommitment_mean", **at[0])
    yield row(
        "Fig. 8c: preempted at 1.6 times overcommitment; abstract: 1.6 without the risk of preemption",
        "negligible; shares and minimums are not stated",
        f"under {NEGLIGIBLE:g} % in {len(few)} of the {len(room)} settings whose minimums leave room (at most "
        f"{most:.1f} %), none seen in {len(none)}; up to {max(preempted(sweep, case) for case in at):.1f} % in the "
        f"other {len(at) - len(room)}; 1.6 is a peak of one moment, the mean of what is offered {offered:.2f}",
        "`ebb sim run`, below",
        f"negligible: met but for {len(room) - len(few)} where minimums leave room; without the risk: none seen in "
        f"{len(none)}, in {len(sweep.kept['seeds'])} seeds of one trace",
    )
    if (ROOT / "experiments/results/fig8d.json").exists():
        yield _placements(Sweep("fig8d"))


def _placements(sweep: Sweep) -> str:
    levels, places = sweep.values("overcommitment"), sweep.values("placement")
    full = [over for over in levels if _all_hosted(sweep, over)]
    apart = {over: _apart(sweep, over) for over in levels if over not in full}
    here, said = [], []
    if full:
        rates = [sweep.mean("low_throughput", overcommitment=full[-1], placement=one) for one in places]
        here.append(
            f"up to {full[-1]:g} all VMs are hosted under every policy, with throughputs of {min(rates):.2f} to "
            f"{max(rates):.2f} at {full[-1]:g}"
        )
        said.append(f"up to {full[-1]:g} the mean of what is hosted is what is offered, and says nothing of a policy")
    if apart:
        worst = max(apart, key=apart.__getitem__)
        here.append(f"beyond, {100 * min(apart.values()):.0f} to {100 * apart[worst]:.0f} % apart")
        said.append(
            f"not similar: {100 * apart[worst]:.0f} % apart at {worst:.1f}"
            if apart[worst] > SIMILAR
            else "similar: met"
        )
    return row(
        "Fig. 8d: overcommitment of servers by best-fit, first-fit, two-choices",
        "similar",
        "; ".join(here),
        "`ebb sim run`, below",
        "; ".join(reversed(said)),
    )


def _all_hosted(sweep: Sweep, over: float) -> bool:
    """Whether all that is offered is hosted under every policy, so that the mean of it cannot differ."""
    return all(
        sweep.mean("hosted_overcommitment", overcommitment=over, placement=one)
        == sweep.mean("offered_overcommitment_mean", overcommitment=over, placement=one)
        for one in sweep.values("placement")
    )


def _apart(sweep: Sweep, over: float) -> float:
    """How far the best placement is above the worst, relative."""
    found = [
        sweep.mean("hosted_overcommitment", overcommitment=over, placement=one) for one in sweep.values("placement")
    ]
    return max(found) / min(found) - 1


def fig8c() -> Iterator[str]:
    sweep, only = Sweep("fig8c-minimums"), Sweep("fig8c-preemption-only")
    yield from ("## Preemptions under overcommitment (Fig. 8c)", "", sweep.made(DRAWN), "", only.made(DRAWN), "")
    every = list(cases(sweep))
    room = [case for case in every if bound(case) < ROOM]
    few = [case for case in room if preempted(sweep, case) < NEGLIGIBLE]
    others = [case for case in room if case not in few]
    half = [case for case in every if 2 * preempted(sweep, case) > preempted(only, alone(case))]
    least = min((bound(case) for case in half), default=0.0)
    beyond = sum(bound(case) > least - 1e-9 for case in every)
    words = (
        "s: the share of low-priority VMs; f: their minimum as a share of what they are sold; bound: 1.6 (1 - s + "
        "s f), what VMs take of the cluster at its peak when every low-priority one has its minimum: above 1 nobody "
        f"can keep them all. At overcommitment 1.6, of {len(every)} settings in {len(room)} it is below {ROOM:g}. "
        f"In {len(few)} of these under {NEGLIGIBLE:g} % of the low-priority VMs are preempted; the others: "
        f"{', '.join(_named(sweep, case) for case in others) or 'none'}. More than half of the preemptions of "
        f"preemption only: {len(half)} of the {beyond} settings with bounds of {least:.2f} and more."
    )
    yield from (
        filled(words),
        "",
        "Preempted within the window, whenever they came, per VM admitted within it; refused of those offered. For",
        "preemption only, in one row for each s, minimums mean nothing.",
        "",
    )
    yield from head("s", "f", "bound", "preempted", "low refused", "high refused")
    for low in sweep.values("low_share"):
        for case in cases(sweep, low_share=low):
            cells = (percent(sweep, metric, case) for metric in METRICS[:3])
            yield row(f"{low:g}", f"{case['minimum_share']:g}", f"{bound(case):.2f}", *cells)
        cells = (percent(only, metric, alone(case)) for metric in METRICS[:3])
        yield row(f"{low:g}", "preemption only", "-", *cells)
    if (ROOT / "experiments/results/fig8c-overcommitment.json").exists():
        yield ""
        yield from _over(Sweep("fig8c-overcommitment"), only)


def _over(sweep: Sweep, only: Sweep) -> Iterator[str]:
    yield from (sweep.made(DRAWN), "")
    yield "Over overcommitment, f = .3; D: deflation, P: preemption only; hosted: time mean of nominal cores per core"
    yield from ("(offered in brackets); throughput of low-priority VMs relative to nominal.", "")
    shares = sweep.values("low_share")
    titles = tuple(f"preempted D; P, s = {share:g}" for share in shares)
    yield from head("overcommitment", "nodes", *titles, "hosted, s = .7", "throughput, s = .7")
    for over in sweep.values("overcommitment"):
        cells = []
        for case in cases(sweep, overcommitment=over):
            cells.append(f"{percent(sweep, METRICS[0], case)}; {percent(only, METRICS[0], alone(case))}")
        last = {"overcommitment": over, "low_share": shares[-1]}
        hosted, offered = (sweep.mean(m, **last) for m in ("hosted_overcommitment", "offered_overcommitment_mean"))
        nodes, throughput = (sweep.mean(m, **last) for m in ("nodes", "low_throughput"))
        yield row(f"{over:g}", f"{nodes:.0f}", *cells, f"{hosted:.2f} ({offered:.2f})", f"{throughput:.2f}")


def _named(sweep: Sweep, case: dict[str, Any]) -> str:
    at = f"s = {case['low_share']:g}, f = {case['minimum_share']:g} (bound {bound(case):.3f})"
    return f"{at} {preempted(sweep, case):.1f} %"


def fig8d() -> Iterator[str]:
    sweep = Sweep("fig8d")
    places = sweep.values("placement")
    yield from ("## Placement policies (Fig. 8d)", "", sweep.made(DRAWN), "")
    yield from (
        "s = .6, f = .3. Hosted overcommitment; low-priority VMs preempted, %; their throughput relative to nominal.",
        "",
    )
    yield from head("overcommitment", *places, "apart")
    for over in sweep.values("overcommitment"):
        cells = []
        for place in places:
            case = {"overcommitment": over, "placement": place}
            hosted, throughput = (sweep.mean(m, **case) for m in ("hosted_overcommitment", "low_throughput"))
            cells.append(f"{hosted:.3f}; {percent(sweep, 'low_preempted_share', case)}; {throughput:.2f}")
        apart = "all are hosted" if _all_hosted(sweep, over) else f"{100 * _apart(sweep, over):.1f} %"
        yield row(f"{over:g}", *cells, apart)


def first() -> Iterator[str]:
    """What stands in every page."""
    yield from claims()
    yield ""
    yield from guests()


SECTIONS = {"fig8c-minimums": fig8c, "fig8d": fig8d}


def written(page: str) -> str:
    """The page with the tables in their place."""
    return placed(page, BEGIN, sections(first, SECTIONS))


if __name__ == "__main__":
    rewrite(PAGE, written, sys.argv[1:], METRICS)

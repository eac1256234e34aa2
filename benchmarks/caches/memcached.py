"""`memcached`: hits a second of a cache whose memory is deflated, with and without the application (004 Fig. 5c).

Both arms begin with the same trained cache and get the same memory limit, directly from 100 %, under load: in a control
group of our own with a file of swap behind it. "Hypervisor" is the limit alone; with "application" the ready adapter
shrinks the cache first. The group's reads from disk are capped at stated rates, as a cloud's volumes are. The OS level
(hot-unplug) needs a guest and is left out.

Each arm is also told as a share of its own rate at full size, measured just before; the hit ratio stands beside what
an ideal LRU of that many places would have kept of the very same requests, and beside the most popular keys, which no
cache beats. That LRU stores what it misses, also while the cache is deflated; the load meanwhile does not, so that
what was evicted and asked for again counts against memcached, which cannot have it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from app_adapters.adapter import Deadline, Promise
from app_adapters.memcached.adapter import MemcachedAdapter
from benchmarks.caches.memcached_client import BATCH, CONNECTIONS, Client
from benchmarks.caches.memcached_report import Row, write, write_table
from benchmarks.caches.memcached_shrink import shrink_latency
from benchmarks.caches.zipf import Keys, Workload, least_recently_used
from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.host.confined import Group, Server, group, server
from benchmarks.host.swapfile import place, swap
from benchmarks.passes import Pass, again_figure, begun_again_when_killed

ARMS = ("hypervisor", "application")
CAPS: tuple[int | None, ...] = (None, 10_000, 5_000, 500)
#: The cap at which everything is measured.
MAIN_CAP = 5_000
#: Load while the cache is trained and while it shrinks, gets a second: slow enough that memcached's clock of whole
#: seconds tells what was used lately.
TRAIN_S = 7.0
TRAIN_GETS_S = 30_000
WINDOW_S = 1.5
WARM_UP_S = 0.3
BACKEND_S = 0.002
#: The adapter's target is so much under the limit, for what the kernel charges beside resident memory.
MARGIN_MIB = 6.0
DEFLATION_LIMIT_S = 120.0
SLICES_A_SECOND = 20


@dataclass(frozen=True)
class Case:
    """A workload and the memory limits at which it is measured."""

    name: str
    count: int
    value_bytes: int
    exponent: float
    shares: tuple[float, ...]
    caps: tuple[int | None, ...]


CASES = (
    Case("zipf_4k", 120_000, 4096, 0.99, (0.75, 0.5, 0.37, 0.25), CAPS),
    Case("zipf_1k", 400_000, 1024, 0.99, (0.5,), (MAIN_CAP,)),
    Case("uniform_4k", 120_000, 4096, 0.0, (0.5,), (MAIN_CAP,)),
)


def cases(quick: bool) -> list[Case]:
    """What is measured; in a quick pass one share of a small cache."""
    if not quick:
        return list(CASES)
    return [replace(CASES[0], count=20_000, shares=(0.5,), caps=(None, MAIN_CAP))]


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed; AdapterError where the adapter fails."""
    if os.geteuid() != 0:
        raise BenchmarkFailed("memcached: needs root, for swap and control groups")
    todo = cases(how.quick)
    largest_mib = max(case.count * case.value_bytes for case in todo) / 2**20
    file = place()
    file.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    again = [0] * how.runs
    with (
        swap(file, int(largest_mib * 1.5), how.report, ours=True) as swap_mib,
        group(file.parent) as inside,
    ):
        if swap_mib < largest_mib:
            raise BenchmarkFailed(f"memcached: {largest_mib:.0f} MiB of swap are needed, there are {swap_mib}")
        for number in range(how.runs):
            for case in todo:
                for share in case.shares:
                    # The order changes, so that what drifts falls on both.
                    for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                        found, killed = _arm(inside, case, share, arm, number, how)
                        rows += found
                        again[number] += killed
                        if how.output is not None:
                            write_table(rows, how.output)
                        how.report(f"run {number + 1} of {how.runs}: " + "; ".join(row.sentence for row in found[:1]))
    latencies = [shrink_latency(how.quick) for _ in range(how.runs)]
    if how.output is not None:
        for path in write(rows, how.output, how.report):
            how.report(f"{path} is written")
    return {
        **figures(rows),
        **_shrink_figures(latencies),
        "begun_again": again_figure(again, "an arm"),
    }


def _arm(inside: Group, case: Case, share: float, arm: str, number: int, how: Pass) -> tuple[list[Row], int]:
    return begun_again_when_killed(
        lambda: list(_measure(inside, case, share, arm, number, how)), f"run {number + 1} of {how.runs}, {arm}", how
    )


def _measure(inside: Group, case: Case, share: float, arm: str, number: int, how: Pass) -> Iterator[Row]:
    """One arm at one share: trained, measured at full size, deflated under load, measured at each cap."""
    # The same seed for both arms: the same keys in the same order, but while they are deflated, which takes one longer.
    workload = Workload(case.count, case.exponent, np.random.default_rng([number, int(share * 100)]))
    meanwhile = workload.drawn_by(np.random.default_rng([number, int(share * 100), 1]))
    window_s = WINDOW_S / 4 if how.quick else WINDOW_S
    limit_mib = int(case.count * case.value_bytes / 2**20 * 2)
    inside.limit(None)
    inside.cap_reads(None)
    with server(inside, limit_mib) as memcached:
        client = Client(memcached.port, case.value_bytes)
        try:
            client.store(np.arange(case.count))
            warm, asked = workload.draw(_enough(WARM_UP_S)), workload.draw(_enough(window_s))
            warmed = client.run(warm, WARM_UP_S)
            full = client.run(asked, window_s)
            trained = _train(client, workload, TRAIN_S / 4 if how.quick else TRAIN_S)
            trained = np.concatenate([warm[: warmed.gets], asked[: full.gets], trained])
            footprint_mib = inside.usage_mib
            to_mib = footprint_mib * share
            with _under_load(client, meanwhile) as read:
                began_s = time.perf_counter()
                if arm == "application":
                    shrink(memcached, to_mib - (footprint_mib - memcached.status_mib("VmRSS")) - MARGIN_MIB)
                inside.limit(to_mib)
                took_s = time.perf_counter() - began_s
            places = int(case.count * share)
            row = Row(case.name, arm, share, number, full.hits_s, footprint_mib, took_s)
            row.ideal = workload.mass(least_recently_used(case.count, np.concatenate([trained, *read]), places))
            row.best = workload.best(places)
            for cap in case.caps:
                inside.cap_reads(cap)
                yield _window(row, client, workload, memcached, inside, window_s, cap, None)
            # Last, since it changes what is in the cache.
            inside.cap_reads(MAIN_CAP)
            yield _window(row, client, workload, memcached, inside, window_s, MAIN_CAP, BACKEND_S)
        except Exception as error:
            memcached.check_lives(error)
            raise
        finally:
            client.close()
            inside.cap_reads(None)


def _window(
    row: Row,
    client: Client,
    workload: Workload,
    memcached: Server,
    inside: Group,
    window_s: float,
    cap: int | None,
    backend_s: float | None,
) -> Row:
    """Gets for a while, after a moment in which the reads of before are done."""
    client.run(workload.draw(_enough(WARM_UP_S)), WARM_UP_S, backend_s)
    keys = workload.draw(_enough(window_s))
    # Of the window alone, without what is still under way at its end.
    counts = [(memcached.major_faults(), inside.reads())]
    load = client.run(keys, window_s, backend_s, lambda: counts.append((memcached.major_faults(), inside.reads())))
    faults, reads = (after - before for before, after in zip(*counts, strict=True))
    return replace(
        row,
        cap=cap,
        stores=backend_s is not None,
        hits_s=load.hits_s,
        served_s=load.served_s,
        hit_ratio=load.hit_ratio,
        faults_per_get=faults / max(load.gets, 1),
        reads_s=reads / load.seconds,
        swapped_mib=memcached.status_mib("VmSwap"),
        load_average=os.getloadavg()[0],
    )


def _enough(seconds: float) -> int:
    """More keys than a client can ask for in that time."""
    return int(1_000_000 * seconds)


def _train(client: Client, workload: Workload, seconds: float) -> Keys:
    """Read at the rate of training; returns the keys that were read."""
    parts = [workload.draw(_slice()) for _ in range(int(seconds * SLICES_A_SECOND))]
    began_s = time.perf_counter()
    for done, keys in enumerate(parts, 1):
        client.run(keys)
        time.sleep(max(began_s + done / SLICES_A_SECOND - time.perf_counter(), 0.0))
    return np.concatenate(parts)


def _slice() -> int:
    """Gets of one slice of paced load, in whole batches."""
    return TRAIN_GETS_S // SLICES_A_SECOND // BATCH * BATCH


@contextmanager
def _under_load(client: Client, workload: Workload) -> Iterator[list[Keys]]:
    """The rate of training goes on meanwhile, as far as memcached answers; gives the keys that were read.

    Raises what the load raised.
    """
    ended = threading.Event()
    read: list[Keys] = []
    errors: list[BaseException] = []

    def go_on() -> None:
        try:
            while not ended.is_set():
                began_s = time.perf_counter()
                read.append(workload.draw(_slice()))
                client.run(read[-1])
                ended.wait(max(began_s + 1 / SLICES_A_SECOND - time.perf_counter(), 0.0))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=go_on, name="load", daemon=True)
    thread.start()
    try:
        yield read
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


def shrink(memcached: Server, target_mib: float) -> None:
    """Have the adapter bring it down to so much resident memory. Raises BenchmarkFailed where it does not."""
    adapter = MemcachedAdapter("127.0.0.1", memcached.port, minimum_mib=16.0)
    answer = adapter.deflate({"memory_mib": target_mib}, "ask", Deadline(DEFLATION_LIMIT_S))
    if not isinstance(answer, Promise):
        raise BenchmarkFailed(f"memcached refused: {answer.reason}")
    release = answer.work()
    if not release.complete:
        raise BenchmarkFailed(f"memcached was not shrunk: {release.reason}")


def figures(rows: list[Row]) -> Figures:
    """Medians over the runs of each measurement, and the ratios of the two arms within each run."""
    found: Figures = {}
    for key in dict.fromkeys(row.key for row in rows):
        case, share, cap, stores = key
        arms = {arm: [row for row in rows if row.key == key and row.arm == arm] for arm in ARMS}
        end = f"{case}_{share:.0%}_{'native' if cap is None else cap}{'_stores' if stores else ''}".replace("%", "")
        words = f"{share:.0%} of the footprint, reads {'as the disk is' if cap is None else f'at most {cap} a second'}"
        words += f", after a miss SET in {BACKEND_S * 1000:g} ms" if stores else ""
        words += f"; {CONNECTIONS} connections, gets of {BATCH} keys"
        for arm, mine in arms.items():
            rates = [row.served_s if stores else row.hits_s for row in mine]
            unit = "values/s" if stores else "hits/s"
            found[f"{arm}_{end}_{'served' if stores else 'hits'}_s"] = Figure.over(rates, unit, words)
            full = ratios(rates, [row.full_hits_s for row in mine])
            found[f"{arm}_{end}_of_full"] = Figure.over(full, "ratio", "the same cache at full size just before")
        both = ratios(*([row.served_s if stores else row.hits_s for row in arms[arm]] for arm in ARMS[::-1]))
        found[f"application_to_hypervisor_{end}"] = Figure.over(both, "ratio", f"the limit alone; {words}")
        if cap == MAIN_CAP and not stores:
            found |= _beside(arms, end, words)
    return found


def _beside(arms: dict[str, list[Row]], end: str, words: str) -> Figures:
    """What explains the rates."""
    found: Figures = {}
    for arm, mine in arms.items():
        found[f"{arm}_{end}_major_faults_per_get"] = Figure.over((row.faults_per_get for row in mine), "1/get", words)
        found[f"{arm}_{end}_reads_s"] = Figure.over((row.reads_s for row in mine), "1/s", words)
        found[f"{arm}_{end}_deflation_s"] = Figure.over((row.took_s for row in mine), "s", words)
    mine, lru = arms["application"], "an ideal LRU of that size that stores all it misses"
    found[f"application_{end}_hit_ratio"] = Figure.over((row.hit_ratio for row in mine), "ratio", words)
    ideal = ratios([row.hit_ratio for row in mine], [row.ideal for row in mine])
    found[f"application_{end}_to_ideal_lru"] = Figure.over(ideal, "ratio", f"hit ratio of {lru}")
    found[f"application_{end}_ideal_lru"] = Figure.over(
        (row.ideal for row in mine), "ratio", f"{lru}; the same requests"
    )
    found[f"application_{end}_most_popular"] = Figure.over((row.best for row in mine), "ratio", "no cache is better")
    return found


def _shrink_figures(found: list[dict[str, float]]) -> Figures:
    units = {"seconds": "s", "released_mib": "MiB", "errors": "errors"}
    return {
        f"shrink_{name}": Figure.over(
            [one[name] for one in found], units.get(name, "ms"), "one shrink under single gets"
        )
        for name in found[0]
    }

"""`throughput`: a memcached VM beside a deflated batch VM, together against either of them alone (004 Fig. 8a).

The host's cores are what both VMs can have at once; undeflated, the batch VM alone fills them. When the memcached VM
comes, the agent deflates the batch VM by half, CPU and memory. Rates are counted in the guests: hits a second of a
client that reads a filled cache over loopback, and rounds a second of a CPU-bound loop in as many processes as the
batch VM has vCPUs. Each rate is normalised to that VM's own rate alone in the same run; the total is their sum.

By the sizes alone it is more than 1: a VM of one core and one of two share two, so that one core each makes 1.5, as
deflated; undeflated, as the host's scheduler shares them among three vCPUs or two VMs, 1.3 to 1.5. What deflation
changes is told by the same two VMs side by side undeflated. All four are measured in each run, in an order
that turns round from run to run. Each load is at work for LEAD_S before and after the window in which it is counted:
so both are under load in both windows, although neither starts at the same moment.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence

from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.host.bench_host import (
    MOUNT_SHM,
    BenchHost,
    bench,
    in_guest,
    lab_link,
    resize,
    run_async,
    running,
    start_vm,
)
from benchmarks.passes import Pass
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab.guest_link import LabLink
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec

CACHE = ResourceVector(cpu_cores=1, memory_mib=512)
BATCH_MIB = 768.0
KEYS = 2000
VALUE_BYTES = 4096
WINDOW_S = 10.0
DEFLATED_BY = 0.5

#: Of a load before and after what is counted of it; it may take less to start.
LEAD_S = 8.0
ARMS = ("cache", "batch", "undeflated", "deflated")

#: Reads keys in turn for a while and prints hits a second of the window.
_READER = """
import socket, time
s = socket.create_connection(("127.0.0.1", 11211)); f = s.makefile("rb")
hits = i = 0; began = time.monotonic()
while (now := time.monotonic() - began) < {lead} + {seconds} + {lead}:
    s.sendall(b"get " + b" ".join(b"bench-%d" % ((i + k) % {keys}) for k in range(20)) + b"\\r\\n"); i += 20
    while True:
        line = f.readline()
        if line == b"END\\r\\n":
            break
        f.read(int(line.split()[3]) + 2); hits += {lead} <= now < {lead} + {seconds}
print(hits / {seconds})
"""
#: Rounds of arithmetic a second of the window, over all processes.
_WORKER = """
import multiprocessing, time
def work(_):
    rounds = 0; began = time.monotonic()
    while (now := time.monotonic() - began) < {lead} + {seconds} + {lead}:
        x = 1
        for n in range(2000):
            x = (x * 1103515245 + n) % 2147483648
        rounds += {lead} <= now < {lead} + {seconds}
    return rounds / {seconds}
with multiprocessing.Pool({processes}) as pool:
    print(sum(pool.map(work, range({processes}), chunksize=1)))
"""


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    cores = max(2, os.cpu_count() or 2)
    with bench(ResourceVector(cpu_cores=cores + 1, memory_mib=4096), how.report) as ground:
        return run_async(_measure(ground, how, cores))


async def _measure(ground: BenchHost, how: Pass, cores: int) -> Figures:
    window_s = 2.0 if how.quick else WINDOW_S
    reads = _READER.format(seconds=window_s, lead=LEAD_S, keys=KEYS)
    works = _WORKER.format(seconds=window_s, lead=LEAD_S, processes=cores)
    nominal = ResourceVector(cpu_cores=cores, memory_mib=BATCH_MIB)
    deflated = nominal * (1 - DEFLATED_BY)
    rows: list[dict[str, tuple[float, float]]] = []
    async with running(ground) as agent:
        batch = await start_vm(agent, VMSpec(name="batch", nominal=Vector.of(nominal), boot_memory_mib=384))
        cache = await start_vm(agent, VMSpec(name="cache", priority=Priority.FIXED, nominal=Vector.of(CACHE)))
        driver = [await lab_link(ground.state.uri, vm.domain) for vm in (cache, batch)]
        reader, worker = driver
        try:
            await in_guest(worker, MOUNT_SHM)
            await reader.call("memcached.fill", prefix="bench-", count=KEYS, value_bytes=VALUE_BYTES)
            for number in range(how.runs):
                rows.append({})
                for arm in in_turn(number):
                    if arm == "deflated":
                        await resize(agent, batch, deflated)
                    hits, rounds = await asyncio.gather(
                        _rate(reader, reads, window_s) if arm != "batch" else _none(),
                        _rate(worker, works, window_s) if arm != "cache" else _none(),
                    )
                    if arm == "deflated":
                        await resize(agent, batch, nominal)
                    rows[-1][arm] = hits, rounds
                    how.report(f"run {number + 1} of {how.runs}, {arm}: {hits:.0f} hits/s, {rounds:.1f} rounds/s")
        finally:
            for hand in driver:
                await hand.close()
            for vm in (cache, batch):
                await agent.host.forget(vm)
    return figures(rows, f"the batch VM alone and undeflated ({nominal})", f", now deflated to {deflated}")


def in_turn(number: int) -> tuple[str, ...]:
    """What a run measures, in its order."""
    return ARMS[:: 1 if number % 2 == 0 else -1]


def figures(rows: Sequence[Mapping[str, tuple[float, float]]], batch_words: str, deflated: str) -> Figures:
    """Of hits and rounds a second of each arm, run by run."""
    made: Figures = {}
    totals: dict[str, list[float]] = {}
    cache_words = f"the memcached VM alone ({CACHE})"
    for arm, end in (("deflated", ""), ("undeflated", "_undeflated")):
        hits = ratios([row[arm][0] for row in rows], [row["cache"][0] for row in rows])
        rounds = ratios([row[arm][1] for row in rows], [row["batch"][1] for row in rows])
        totals[arm] = [sum(pair) for pair in zip(hits, rounds, strict=True)]
        beside = f"{deflated if arm == 'deflated' else ''}; both at once"
        made[f"total{end}"] = Figure.over(totals[arm], "ratio", f"sum of both normalised rates{beside}")
        made[f"memcached_together{end}"] = Figure.over(hits, "ratio", f"{cache_words}; both at once")
        made[f"batch_{arm}_together"] = Figure.over(rounds, "ratio", f"{batch_words}{beside}")
    made["total_to_undeflated"] = Figure.over(
        ratios(totals["deflated"], totals["undeflated"]), "ratio", "both at once with the batch VM undeflated"
    )
    return made


async def _none() -> float:
    return 0.0


async def _rate(guest: LabLink, program: str, window_s: float) -> float:
    """Run a Python program in a guest and return the figure that it prints.

    Raises BenchmarkFailed where it took so long to start that its window may be beside the other one's load.
    """
    quoted = program.replace("'", "'\"'\"'")
    began_s = time.monotonic()
    found = float(await in_guest(guest, f"python3 -S -c '{quoted}'"))
    late_s = time.monotonic() - began_s - (2 * LEAD_S + window_s)
    if late_s > LEAD_S:
        raise BenchmarkFailed(f"a load took up to {late_s:.1f} s to start, so that windows may lie apart")
    return found

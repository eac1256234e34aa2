"""`throughput`: a memcached VM beside a deflated batch VM, together against either of them alone (004 Fig. 8a).

The host's cores are what both VMs can have at once; undeflated, the batch VM alone fills them. When the memcached VM
comes, the agent deflates the batch VM by half, CPU and memory. Rates are counted in the guests: hits a second of a
client that reads a filled cache over loopback, and rounds a second of a CPU-bound loop in as many processes as the
batch VM has vCPUs. Each rate is normalised to that VM's own rate alone in the same run; the total is their sum: 1 is
what either of them gives without the other.
"""

from __future__ import annotations

import asyncio
import os

from benchmarks.figures import Figure, Figures
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

#: Reads keys in turn for a while and prints hits a second.
_READER = """
import socket, time
s = socket.create_connection(("127.0.0.1", 11211)); f = s.makefile("rb")
hits = i = 0; began = time.monotonic()
while time.monotonic() - began < {seconds}:
    s.sendall(b"get " + b" ".join(b"bench-%d" % ((i + k) % {keys}) for k in range(20)) + b"\\r\\n"); i += 20
    while True:
        line = f.readline()
        if line == b"END\\r\\n":
            break
        f.read(int(line.split()[3]) + 2); hits += 1
print(hits / (time.monotonic() - began))
"""
#: Rounds of arithmetic a second, over all processes.
_WORKER = """
import multiprocessing, time
def work(_):
    rounds = 0; began = time.monotonic()
    while time.monotonic() - began < {seconds}:
        x = 1
        for n in range(2000):
            x = (x * 1103515245 + n) % 2147483648
        rounds += 1
    return rounds / (time.monotonic() - began)
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
    nominal = ResourceVector(cpu_cores=cores, memory_mib=BATCH_MIB)
    deflated = nominal * (1 - DEFLATED_BY)
    cache_together, batch_together, totals = [], [], []
    async with running(ground) as agent:
        batch = await start_vm(agent, VMSpec(name="batch", nominal=Vector.of(nominal), boot_memory_mib=384))
        cache = await start_vm(agent, VMSpec(name="cache", priority=Priority.FIXED, nominal=Vector.of(CACHE)))
        driver = [await lab_link(ground.state.uri, vm.domain) for vm in (cache, batch)]
        reader, worker = driver
        try:
            await in_guest(worker, MOUNT_SHM)
            await reader.call("memcached.fill", prefix="bench-", count=KEYS, value_bytes=VALUE_BYTES)
            for number in range(how.runs):
                cache_alone = await _rate(reader, _READER.format(seconds=window_s, keys=KEYS))
                batch_alone = await _rate(worker, _WORKER.format(seconds=window_s, processes=cores))
                outcome = await resize(agent, batch, deflated)
                both = await asyncio.gather(
                    _rate(reader, _READER.format(seconds=window_s, keys=KEYS)),
                    _rate(worker, _WORKER.format(seconds=window_s, processes=cores)),
                )
                cache_together.append(both[0] / cache_alone)
                batch_together.append(both[1] / batch_alone)
                totals.append(cache_together[-1] + batch_together[-1])
                how.report(
                    f"run {number + 1} of {how.runs}: alone {cache_alone:.0f} hits/s and {batch_alone:.1f} rounds/s, "
                    f"together {both[0]:.0f} and {both[1]:.1f}, total {totals[-1]:.2f}; batch {outcome.sentence}"
                )
                await resize(agent, batch, nominal)
        finally:
            for hand in driver:
                await hand.close()
            for vm in (cache, batch):
                await agent.host.forget(vm)
    batch_words = f"the batch VM alone and undeflated ({nominal})"
    cache_words = f"the memcached VM alone ({CACHE})"
    return {
        "total": Figure.over(totals, "ratio", f"sum of both normalised rates; 1 is what {cache_words} gives"),
        "memcached_together": Figure.over(cache_together, "ratio", cache_words),
        "batch_deflated_together": Figure.over(batch_together, "ratio", f"{batch_words}, now deflated to {deflated}"),
    }


async def _rate(guest: LabLink, program: str) -> float:
    """Run a Python program in a guest and return the figure that it prints."""
    quoted = program.replace("'", "'\"'\"'")
    return float(await in_guest(guest, f"python3 -S -c '{quoted}'"))

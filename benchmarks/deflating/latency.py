"""`latency`: how long it takes to get memory from one large VM, with and without the application (004 Fig. 8b).

The VM is half of the host's memory, or as much as is free. memcached holds FILLED of it. The VM is deflated by 10 to
50 % of its memory; with the application, its cache is made smaller first, as in the cascade; without, it is not asked,
so that only what the guest has idle can be unplugged and the rest has to go to swap through the limit that swap backs
(on a host without swap: a file for the time of the benchmark). Where that falls short, the seconds are those of what
was reached, and the share that was reached is given.

Between two deflations the VM gets its size back and what was evicted is stored again.
"""

from __future__ import annotations

import time

import psutil

from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.host.bench_host import (
    RESERVE_MIB,
    BenchHost,
    bench,
    in_guest,
    lab_link,
    room_mib,
    run_async,
    running,
    start_vm,
)
from benchmarks.host.swapfile import swap
from benchmarks.host.vm_driver import VMDriver, driven
from benchmarks.passes import Pass
from ebbtide.deflation.cascade.instructions import Outcome
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab.guest_link import LabLink
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.running import OVERHEAD_MIB

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
FILLED = 0.6
SMALLEST_MIB = 1024.0
VALUE_BYTES = 64 * 1024
PORT = 11211
#: memcached's limit above what is stored: values share chunks of fixed sizes.
ROOM = 1.25
#: Part of the values that must be there: memcached may evict a few while it moves pages.
PRESENT = 0.95
VCPUS = 2
#: Part of what was asked for that counts as having got there.
ARRIVED = 0.98

#: Stores what is missing and prints how many values there are then. Asked and stored in batches: under emulation round
#: trips would take most of the time (memcached doc/protocol.txt: meta get with q and k answers hits only).
_FILLER = """
import socket
s = socket.create_connection(("127.0.0.1", {port})); f = s.makefile("rb")
value = bytes(range(256)) * ({size} // 256)
there = 0
for again in (False, True):
    for first in range(0, {count}, 100):
        keys = [b"bench-%d" % i for i in range(first, min(first + 100, {count}))]
        s.sendall(b"".join(b"mg " + key + b" k q\\r\\n" for key in keys) + b"mn\\r\\n")
        hits = set()
        while not (line := f.readline()).startswith(b"MN"):
            hits.add(line.split()[1][1:])
        there += again * len(hits)
        if not again:
            missing = [key for key in keys if key not in hits]
            s.sendall(b"".join(b"set " + k + b" 0 0 {size} noreply\\r\\n" + value + b"\\r\\n" for k in missing))
print(there)
"""


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    half = psutil.virtual_memory().total / 2**20 / 2
    overhead = max(OVERHEAD_MIB.values())
    size_mib = min(half, room_mib(half + overhead) - overhead, *((SMALLEST_MIB,) if how.quick else ())) // 128 * 128
    if size_mib < SMALLEST_MIB:
        needs_mib = SMALLEST_MIB + overhead + RESERVE_MIB
        raise BenchmarkFailed(f"a VM of {SMALLEST_MIB:g} MiB needs {needs_mib:g} MiB of free memory")
    capacity = ResourceVector(cpu_cores=VCPUS, memory_mib=size_mib + overhead)
    with (
        bench(capacity, how.report) as ground,
        # Not in the lab's own directory, which goes with the lab: what a killed benchmark left must be found again.
        swap(ground.lab.directory.with_suffix(".swap"), int(size_mib), how.report) as swap_mib,
    ):
        return run_async(_measure(ground, how, size_mib, swap_mib, half))


async def _measure(ground: BenchHost, how: Pass, size_mib: float, swap_mib: int, half_mib: float) -> Figures:
    shares = SHARES[2::2] if how.quick else SHARES
    found: dict[tuple[bool, float], list[Outcome]] = {(asked, share): [] for share in shares for asked in (True, False)}
    nominal = ResourceVector(cpu_cores=VCPUS, memory_mib=size_mib)
    async with running(ground) as agent:
        # Enough of it can be unplugged; the floor of boot memory keeps the guest's kernel.
        vm = await start_vm(agent, VMSpec(name="latency", nominal=Vector.of(nominal), boot_memory_mib=size_mib // 2))
        guest = await lab_link(ground.state.uri, vm.domain)
        try:
            await _grow_cache(guest, size_mib)
            async with driven(vm) as driver:
                for number in range(how.runs):
                    for asked, share in found:
                        seconds = await _fill(guest, size_mib)
                        outcome = await _take(driver, size_mib * (1 - share), asked)
                        await driver.give_back()
                        found[asked, share].append(outcome)
                        how.report(
                            f"run {number + 1} of {how.runs}, {share:.0%} {'with' if asked else 'without'} the "
                            f"application (filled in {seconds:.0f} s): {outcome.sentence}"
                        )
        finally:
            await guest.close()
            await agent.host.forget(vm)
    conditions = (
        f"a VM of {size_mib:g} MiB (half of this host would be {half_mib:.0f}), {FILLED:.0%} of it in memcached, "
        f"{swap_mib} MiB of swap"
    )
    return _figures(found, shares, conditions)


def _figures(found: dict[tuple[bool, float], list[Outcome]], shares: tuple[float, ...], conditions: str) -> Figures:
    figures: Figures = {}
    for share in shares:
        seconds = {asked: [max(o.seconds, 1e-3) for o in found[asked, share]] for asked in (True, False)}
        for asked, name in ((True, "with"), (False, "without")):
            key = f"{name}_application_{share:.0%}".replace("%", "")
            figures[f"{key}_s"] = Figure.over(seconds[asked], "s", f"{share:.0%} of memory taken; {conditions}")
            figures[f"{key}_reached"] = Figure.over(
                [_reached(o) for o in found[asked, share]], "ratio", "what was asked"
            )
        # Who gives up early is not faster.
        if all(_reached(outcome) >= ARRIVED for asked in (True, False) for outcome in found[asked, share]):
            key = f"without_to_with_{share:.0%}".replace("%", "")
            of = "the same deflation with the application, in the same run"
            figures[key] = Figure.over(ratios(seconds[False], seconds[True]), "ratio", of)
    return figures


def _reached(outcome: Outcome) -> float:
    """The share of the memory asked for that was taken."""
    asked = outcome.before.memory_mib - outcome.target.memory_mib
    return (outcome.before.memory_mib - outcome.after.memory_mib) / asked if asked > 0 else 1.0


async def _take(driver: VMDriver, memory_mib: float, asked: bool) -> Outcome:
    means = [one for one in Mechanism if asked or one is not Mechanism.APPLICATION]
    return await driver.take(ResourceVector(cpu_cores=VCPUS, memory_mib=memory_mib), means)


async def _grow_cache(guest: LabLink, size_mib: float) -> None:
    """Let memcached hold what is to be filled."""
    limit_mib = int(size_mib * FILLED * ROOM)
    answer = await in_guest(guest, f"printf 'cache_memlimit {limit_mib}\\r\\nquit\\r\\n' | busybox nc 127.0.0.1 11211")
    if "OK" not in answer:
        raise BenchmarkFailed(f"memcached does not take a limit of {limit_mib} MiB: {answer.strip()}")


async def _fill(guest: LabLink, size_mib: float) -> float:
    """Store what is missing; returns the seconds it took."""
    count = int(size_mib * FILLED * 2**20 / VALUE_BYTES)
    program = filler(count).replace("'", "'\"'\"'")
    began_s = time.perf_counter()
    there = int(await in_guest(guest, f"python3 -S -c '{program}'"))
    if there < count * PRESENT:
        raise BenchmarkFailed(f"memcached holds {there} of {count} values")
    return time.perf_counter() - began_s


def filler(count: int, port: int = PORT) -> str:
    """The program that stores what is missing of ``count`` values and prints how many are there."""
    return _FILLER.format(size=VALUE_BYTES, count=count, port=port)

"""`latency`: how long it takes to get memory from one large VM, with and without the application (004 Fig. 8b).

The VM is half of the host's memory, or as much as is free. memcached holds FILLED of it. The VM is deflated by 10 to
50 % of its memory; with the application, its cache is made smaller first, as in the cascade; without, it is not asked,
so that only what the guest has idle can be unplugged and the rest has to go to swap through the limit that swap backs
(a file for the time of the benchmark). Where that falls short, the seconds are those of what was reached, and the share
that was reached is given. The largest share is also taken with the VM's reads from swap capped, as a cloud's volumes
are; by virtio-mem alone from the same guest while its cache is empty; and by the application alone first, of which
nothing is unplugged meanwhile, and by virtio-mem alone then. The slower of these last two, which both have to do with
what memcached keeps, is what the cascade has to keep up with: it is one of the cases, and finds the guest as they do.
How much memory the guest's kernel had to move out of the way is counted each time.

Between two deflations the VM gets its size back, what is in swap is read back (otherwise the next deflation would move
memory that the one before has left there), and what was evicted is stored again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.figures import BenchmarkFailed, Figure, Figures, ratios
from benchmarks.host.bench_host import (
    MOUNT_SHM,
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
from benchmarks.host.confined import reads_capped
from benchmarks.host.swapfile import bring_back, place, swap
from benchmarks.host.vm_driver import VMDriver, driven
from benchmarks.passes import Pass
from ebbtide.deflation.cascade.instructions import Outcome
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.ledger import Layer
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab.guest_link import LabLink
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.limits.footprints import qemu_pid
from hostagent.running import OVERHEAD_MIB

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
FILLED = 0.6
#: Of an idle guest's memory: so much is touched and freed again before virtio-mem takes it alone.
TOUCHED = 0.7
SMALLEST_MIB = 1024.0
#: Reads a second that the VM may do from the disk of the swap: as many as the disk gives, and capped.
NATIVE = 0
CAPS = (5_000, 500)
VALUE_BYTES = 64 * 1024
PORT = 11211
#: memcached's limit above what is stored: values share chunks of fixed sizes.
ROOM = 1.25
#: Part of the values that must be there: memcached may evict a few while it moves pages.
PRESENT = 0.95
VCPUS = 2
#: As the figures of virtio-mem by itself are named: on an empty cache, and after the application.
ALONE = "virtio_mem"
AFTER = "virtio_mem_after_application"
APART = "application_and_virtio_mem_apart"
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


@dataclass(frozen=True, order=True)
class Case:
    """One way to take memory: the share of it, whether the application is asked, reads a second from swap.

    apart: by the application alone, and then by virtio-mem alone.
    """

    share: float
    asked: bool
    reads_s: int = NATIVE
    apart: bool = False

    @property
    def end(self) -> str:
        """As the names of its figures end."""
        return f"{self.share:.0%}".replace("%", "") + (f"_{self.reads_s}_reads" if self.reads_s else "")

    @property
    def compared(self) -> bool:
        """Whether it is the largest share, taken at once or one means after the other, the swap as fast as it is."""
        return self.share == SHARES[-1] and self.reads_s == NATIVE

    @property
    def paired(self) -> bool:
        """Whether it is such a one with the application."""
        return self.asked and self.compared

    @property
    def name(self) -> str:
        if self.apart:
            return APART
        return f"{'with' if self.asked else 'without'}_application_{self.end}"


@dataclass
class Found:
    """The outcomes of all cases, a value a run, of virtio-mem alone on an empty cache, of the application alone, and of
    virtio-mem alone after it. `moved_mib`: what the guest's kernel moved, by what was done."""

    cases: dict[Case, list[Outcome]]
    alone: list[Outcome] = field(default_factory=list)
    application: list[Outcome] = field(default_factory=list)
    after: list[Outcome] = field(default_factory=list)
    moved_mib: dict[str, list[float]] = field(default_factory=dict)


def cases(quick: bool, number: int = 0) -> list[Case]:
    """In the order of a run. Of those that are compared, which comes first changes from run to run."""
    shares = SHARES[2::2] if quick else SHARES
    capped = [(shares[-1], reads_s) for reads_s in (CAPS[:1] if quick else CAPS)]
    order = [*_both([*((share, NATIVE) for share in shares), *capped])]
    # Right beside what it is held against.
    order.insert(order.index(Case(shares[-1], True)), Case(shares[-1], True, apart=True))
    return order[:: 1 if number % 2 == 0 else -1]


def begins_anew(before: Case | None, case: Case) -> bool:
    """Whether the guest is deflated and filled once more, unmeasured, before a case of a run.

    All three that are held against each other find it after the same thing, a deflation of the same share with the
    application, whatever came before: that of another one of them, or an unmeasured one.
    """
    return before is None or (case.compared and not before.paired)


def _both(kinds: list[tuple[float, int]]) -> Iterator[Case]:
    for number, (share, reads_s) in enumerate(kinds):
        for asked in (True, False) if number % 2 == 0 else (False, True):
            yield Case(share, asked, reads_s)


def run(how: Pass) -> Figures:
    """Raises BenchmarkFailed, EbbError or LabError."""
    half = how.vm_mib or psutil.virtual_memory().total / 2**20 / 2
    overhead = max(OVERHEAD_MIB.values())
    size_mib = min(half, room_mib(half + overhead) - overhead, *((SMALLEST_MIB,) if how.quick else ())) // 128 * 128
    if size_mib < SMALLEST_MIB:
        needs_mib = SMALLEST_MIB + overhead + RESERVE_MIB
        raise BenchmarkFailed(f"a VM of {SMALLEST_MIB:g} MiB needs {needs_mib:g} MiB of free memory")
    capacity = ResourceVector(cpu_cores=VCPUS, memory_mib=size_mib + overhead)
    with bench(capacity, how.report) as ground:
        file = place()
        with swap(file, int(size_mib), how.report, ours=True) as swap_mib:
            found = run_async(_measure(ground, how, size_mib, file))
    conditions = (
        f"a VM of {size_mib:g} MiB, {VCPUS} vCPUs, {FILLED:.0%} of it in memcached, {swap_mib} MiB of swap, "
        f"host of {psutil.virtual_memory().total / 2**20:.0f} MiB"
    )
    return figures(found, conditions)


async def _measure(ground: BenchHost, how: Pass, size_mib: float, swap_file: Path) -> Found:
    found = Found({case: [] for case in cases(how.quick) if not case.apart})
    largest = max(case.share for case in found.cases)
    nominal = ResourceVector(cpu_cores=VCPUS, memory_mib=size_mib)
    async with running(ground) as agent:
        # Enough of it can be unplugged; the floor of boot memory keeps the guest's kernel.
        vm = await start_vm(agent, VMSpec(name="latency", nominal=Vector.of(nominal), boot_memory_mib=size_mib // 2))
        guest = await lab_link(ground.state.uri, vm.domain)
        try:
            await in_guest(guest, f"{MOUNT_SHM}; mount -o remount,size=100% /dev/shm")
            async with driven(vm) as driver:
                for number in range(how.runs):
                    await _empty(driver, guest, size_mib)
                    # As much as can be unplugged; the balloon is not in it.
                    size = nominal.with_component("memory_mib", size_mib * (1 - largest))
                    async with _moved(guest, found, ALONE):
                        found.alone.append(outcome := await driver.take(size, [Mechanism.VIRTIO_MEM]))
                    await driver.give_back()
                    how.report(f"run {number + 1} of {how.runs}, virtio-mem alone: {outcome.sentence}")
                    await _grow_cache(guest, size_mib)
                    before: Case | None = None
                    for case in cases(how.quick, number):
                        if begins_anew(before, case):
                            await _fill(guest, size_mib)
                            await _take(driver, size.memory_mib, asked=True)
                            await _back(driver, guest, swap_file, size_mib)
                        seconds = await _fill(guest, size_mib)
                        if case.apart:
                            outcome = await _apart(driver, guest, found, size)
                        else:
                            capped = reads_capped(qemu_pid(vm.domain), swap_file.parent, case.reads_s or None)
                            async with _moved(guest, found, case.name):
                                with capped:
                                    outcome = await _take(driver, size_mib * (1 - case.share), case.asked)
                            found.cases[case].append(outcome)
                        await _back(driver, guest, swap_file, size_mib)
                        before = case
                        how.report(
                            f"run {number + 1} of {how.runs}, {case.name} (filled in {seconds:.0f} s): "
                            f"{outcome.sentence}"
                        )
        finally:
            await guest.close()
            await agent.host.forget(vm)
    return found


async def _back(driver: VMDriver, guest: LabLink, swap_file: Path, size_mib: float) -> None:
    """All memory, nothing in swap, and room in the cache for what is to be filled again."""
    await driver.give_back()
    await asyncio.to_thread(bring_back, swap_file)
    await _grow_cache(guest, size_mib)


async def _apart(driver: VMDriver, guest: LabLink, found: Found, size: ResourceVector) -> Outcome:
    """The application alone, of which nothing is unplugged meanwhile, and then virtio-mem alone; gives the latter."""
    found.application.append(await driver.take(size, [Mechanism.APPLICATION]))
    async with _moved(guest, found, AFTER):
        found.after.append(outcome := await driver.take(size, [Mechanism.VIRTIO_MEM]))
    return outcome


def figures(found: Found, conditions: str) -> Figures:
    """Seconds, what was reached, and the ratios of what one run measured."""
    made: Figures = {}
    for case, outcomes in found.cases.items():
        words = f"{case.share:.0%} of memory taken; {conditions}"
        words += f"; the VM reads at most {case.reads_s} times a second from the disk of the swap" * bool(case.reads_s)
        made[f"{case.name}_s"] = Figure.over([_seconds(o) for o in outcomes], "s", words)
        made[f"{case.name}_reached"] = Figure.over([_reached(o) for o in outcomes], "ratio", "what was asked")
    for case, outcomes in found.cases.items():
        without = found.cases[Case(case.share, False, case.reads_s)]
        # Who gives up early is not faster.
        if case.asked and all(_reached(outcome) >= ARRIVED for outcome in [*outcomes, *without]):
            of = "the same deflation with the application, in the same run"
            both = ratios([_seconds(o) for o in without], [_seconds(o) for o in outcomes])
            made[f"without_to_with_{case.end}"] = Figure.over(both, "ratio", of)
    largest = max(case.share for case in found.cases)
    ours = [_mib_s(outcome) for outcome in found.cases[Case(largest, True)]]
    alone = [_mib_s(outcome) for outcome in found.alone]
    what = f"{largest:.0%} of memory by virtio-mem alone, the cache empty; {conditions}"
    made["virtio_mem_mib_s"] = Figure.over(alone, "MiB/s", what)
    made["virtio_mem_reached"] = Figure.over([_reached(outcome) for outcome in found.alone], "ratio", "what was asked")
    name = Case(largest, True).name
    made[f"{name}_mib_s"] = Figure.over(ours, "MiB/s", f"memory taken over {name}_s; {conditions}")
    times = [_application_s(outcome) for outcome in found.application]
    own = f"memcached's own time for {largest:.0%} of memory, nothing unplugged; {conditions}"
    made["application_alone_s"] = Figure.over(times, "s", own)
    after = [_seconds(outcome) for outcome in found.after]
    then = f"{largest:.0%} of memory by virtio-mem alone, once the application alone has done; {conditions}"
    made[f"{AFTER}_s"] = Figure.over(after, "s", then)
    made[f"{AFTER}_reached"] = Figure.over([_reached(outcome) for outcome in found.after], "ratio", "what was asked")
    slower = [max(pair) for pair in zip(times, after, strict=True)]
    with_s = [_seconds(outcome) for outcome in found.cases[Case(largest, True)]]
    of = f"the slower of application_alone_s and {AFTER}_s, in the same run"
    made[f"{name}_to_slower_alone"] = Figure.over(ratios(with_s, slower), "ratio", of)
    for what_moved in (ALONE, AFTER, name):
        moved = "moved by the guest's kernel to empty what it unplugs (pgmigrate_success)"
        made[f"{what_moved}_moved_mib"] = Figure.over(found.moved_mib[what_moved], "MiB", moved)
    made[f"{name}_to_virtio_mem"] = Figure.over(ratios(ours, alone), "ratio", f"virtio_mem_mib_s: {what}")
    return made


def _seconds(outcome: Outcome) -> float:
    return max(outcome.seconds, 1e-3)


def _application_s(outcome: Outcome) -> float:
    """How long the application was at work on memory."""
    mine = (one for one in outcome.ledger if one.layer is Layer.APPLICATION and one.resource == "memory_mib")
    return max(sum(one.seconds for one in mine), 1e-3)


def _mib_s(outcome: Outcome) -> float:
    return max(outcome.before.memory_mib - outcome.after.memory_mib, 1e-3) / _seconds(outcome)


def _reached(outcome: Outcome) -> float:
    """The share of the memory asked for that was taken."""
    asked = outcome.before.memory_mib - outcome.target.memory_mib
    return (outcome.before.memory_mib - outcome.after.memory_mib) / asked if asked > 0 else 1.0


async def _take(driver: VMDriver, memory_mib: float, asked: bool) -> Outcome:
    means = [one for one in Mechanism if asked or one is not Mechanism.APPLICATION]
    return await driver.take(ResourceVector(cpu_cores=VCPUS, memory_mib=memory_mib), means)


@contextlib.asynccontextmanager
async def _moved(guest: LabLink, found: Found, name: str) -> AsyncIterator[None]:
    """Count what the guest's kernel moves meanwhile, in pages of 4 KiB."""
    ask = "grep -w pgmigrate_success /proc/vmstat"
    before = (await in_guest(guest, ask)).split()[1]
    yield
    pages = int((await in_guest(guest, ask)).split()[1]) - int(before)
    found.moved_mib.setdefault(name, []).append(pages / 256)


async def _empty(driver: VMDriver, guest: LabLink, size_mib: float) -> None:
    """Leave the guest idle, its memory touched and free: its cache as small as it gets, by the application itself."""
    await in_guest(guest, "printf 'flush_all\\r\\nquit\\r\\n' | busybox nc 127.0.0.1 11211")
    await driver.take(ResourceVector(cpu_cores=VCPUS, memory_mib=SMALLEST_MIB / 2), [Mechanism.APPLICATION])
    mib = int(size_mib * TOUCHED)
    await in_guest(guest, f"head -c {mib}M /dev/zero >/dev/shm/touch; rm /dev/shm/touch")


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


def filler(count: int, port: int = PORT, size: int = VALUE_BYTES) -> str:
    """The program that stores what is missing of ``count`` values and prints how many are there."""
    return _FILLER.format(size=size, count=count, port=port)

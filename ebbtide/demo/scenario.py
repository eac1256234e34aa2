"""The scenario: fill two deflatable VMs, place a fixed one that fits only if they shrink, delete it, look again."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable

from ebbtide.client import ManagerClient, ManagerRefused
from ebbtide.deflation.allocations import Priority
from ebbtide.demo import checks
from ebbtide.demo.cache import Cache
from ebbtide.demo.errors import DemoFailed
from ebbtide.demo.report import Check, DemoReport, Readings, VMReport
from ebbtide.errors import EbbError
from ebbtide.lab.errors import ReadingError
from ebbtide.lab.readings import Gauge, Reading
from ebbtide.lab.state import LabState
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import Operation, OperationState, VMOutcome
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.messages.vms import VMSpec
from hostagent.libvirt.hypervisor import domain_name

Report = Callable[[str], None]

LOW = ("low-1", "low-2")
HIGH = "high-1"
LOW_NOMINAL = Vector(cpu_cores=3, memory_mib=1024)
LOW_MINIMUM = Vector(cpu_cores=0.5, memory_mib=320)
LOW_BOOT_MIB = 512.0
#: What each low VM has to give: more CPU than whole ones, so that a quota is needed; more memory than the 512 MiB that
#: virtio-mem holds, so that the balloon is needed; more than the guest has idle, so that the cache is needed.
GIVES = Vector(cpu_cores=1.75, memory_mib=640)
#: 325 MiB of values in each cache.
KEYS = 10_400
HOT_KEYS = 100
#: For a deflation or a reinflation, seconds. A cache is emptied by the same CPUs that filled it: a slow machine has
#: this times as long as its filling took.
DEADLINE_S = 120.0
FILLINGS = 6.0
#: A guest that answers so quickly, a few times running, is at rest; how long that is waited for, seconds.
QUICK_S = 1.0
QUICK_TIMES = 3
REST_S = 60.0
#: How long what the kernel gives back by and by may take, seconds.
FOLLOWS_S = 30.0
READY_S = 120.0
TASK_S = 600.0
_PAUSE_S = 0.5


class Demo:
    """One run over the lab that ``state`` describes. Its VMs are gone at the end, however it ends."""

    def __init__(self, client: ManagerClient, state: LabState, report: Report) -> None:
        self._client = client
        self._state = state
        self._report = report
        self._begun: list[str] = []
        self._checks: list[Check] = []
        self._caches: dict[str, Cache] = {}
        self._gauges: dict[str, Gauge] = {}
        self._deadline_s = DEADLINE_S

    async def run(self) -> DemoReport:
        """Raises DemoFailed or another EbbError if the scenario cannot be gone through; a failed check is no error."""
        begin_s, begun_at = time.monotonic(), time.time()
        await self._refuse_leftovers()
        try:
            vms, outcomes = await self._scenario()
            found = [change for name in LOW for change in await self._client.core_changes(name)]
            # Earlier VMs of these names have a history, too.
            changes = [change for change in found if change.at >= begun_at]
            for name in LOW:
                mine = [change for change in changes if change.machine == name]
                self._checks.append(checks.cores_were_reported(name, mine, outcomes[name]))
            ranking = await self._client.machines(TASK_S)
        finally:
            await self._remove()
        return DemoReport(
            accelerator=self._state.accelerator,
            seconds=round(time.monotonic() - begin_s, 1),
            vms=tuple(vms),
            core_changes=tuple(changes),
            ranking=tuple(ranking),
            checks=tuple(self._checks),
        )

    async def _scenario(self) -> tuple[list[VMReport], dict[str, VMOutcome]]:
        await self._start_low()
        filling_s = await self._fill("filling")
        self._deadline_s = max(DEADLINE_S, FILLINGS * filling_s)
        await self._at_rest()
        before = await self._read_all()
        hot = {name: self._caches[name].latest(HOT_KEYS) for name in LOW}
        for name in LOW:
            self._checks.append(checks.was_filled(name, before[name]))
            found = await self._caches[name].digests(list(hot[name]))
            self._checks.append(checks.keys_answer(name, "before", hot[name], found))

        high = await self._high_spec()
        self._report(f"placing {HIGH}: {high.nominal.vector()}, which fits only if {' and '.join(LOW)} shrink")
        operation = await self._finish(await self._create(HIGH, high))
        outcomes = {outcome.name: outcome for outcome in operation.vms if outcome.name in LOW}
        for name in LOW:
            if name not in outcomes:
                raise DemoFailed(f"{HIGH} was placed without a deflation of {name}: {operation.sentence}")
            self._report(f"{name}: {outcomes[name].sentence}")
        deflated, deflated_sizes = await self._read_deflated(), await self._sizes()
        for name in LOW:
            self._checks.append(checks.resident_follows(name, deflated[name]))
            found = await self._caches[name].digests(list(hot[name]))
            self._checks.append(checks.keys_answer(name, "while it is deflated", hot[name], found))

        self._report(f"deleting {HIGH}")
        await self._finish(await self._client.delete(HIGH))
        self._begun.remove(HIGH)
        await self._await_restored(before)
        restored_sizes = await self._sizes()
        await self._fill("refilling")
        restored = await self._read_all()
        vms = [
            VMReport(
                name=name,
                priority=Priority.DEFLATABLE,
                nominal=LOW_NOMINAL,
                deflated=deflated_sizes[name],
                restored=restored_sizes[name],
                ledger=outcomes[name].ledger,
                readings=Readings(before=before[name], deflated=deflated[name], restored=restored[name]),
            )
            for name in LOW
        ]
        self._checks.extend(checks.layers_gave(vms))
        for vm in vms:
            self._checks.append(checks.adds_up(vm))
            self._checks.append(checks.is_restored(vm))
            found = await self._caches[vm.name].digests(list(hot[vm.name]))
            self._checks.append(checks.keys_answer(vm.name, "afterwards", hot[vm.name], found))
        return vms, outcomes

    async def _refuse_leftovers(self) -> None:
        """Other VMs would take part in every split, and the figures would not be the demo's.

        One of a name of the demo's that is being placed is called off by its deletion. A failed one without a host is
        in no way of another one.
        """
        others = sorted(
            vm.name
            for vm in await self._client.vms()
            if vm.host is not None or (vm.name in (*LOW, HIGH) and vm.state != "failed")
        )
        if others:
            raise DemoFailed(
                f"the lab holds VMs already ({', '.join(others)}), which would shrink with those of the demo, or be "
                f"taken for them; `ebb vm delete {others[0]} --yes` removes one"
            )

    async def _high_spec(self) -> VMSpec:
        """As large as what the host has free and GIVES of each low VM, less the overhead of this VM itself."""
        home = {vm.host for vm in await self._client.vms() if vm.name in LOW}
        hosts = [host for host in await self._client.hosts() if host.id in home]
        if len(hosts) != 1:
            raise DemoFailed(f"{' and '.join(LOW)} must be on one host, but are on {len(hosts)}")
        capacity, free = hosts[0].capacity, hosts[0].free
        sizes = len(LOW) * LOW_NOMINAL.memory_mib
        overhead_mib = max((capacity.memory_mib - free.memory_mib - sizes) / len(LOW), 0.0)
        room = free.vector() + len(LOW) * GIVES.vector()
        nominal = Vector(cpu_cores=room.cpu_cores, memory_mib=math.floor((room.memory_mib - overhead_mib) / 2) * 2)
        return VMSpec(name=HIGH, priority=Priority.FIXED, nominal=nominal)

    async def _create(self, name: str, spec: VMSpec) -> Operation:
        self._begun.append(name)
        try:
            return await self._client.create(spec, deadline_s=self._deadline_s)
        except ManagerRefused as error:
            if error.code is ProblemCode.ALREADY_EXISTS:
                self._begun.remove(name)  # another's, which is not ours to delete
            raise

    async def _start_low(self) -> None:
        self._report(f"starting {' and '.join(LOW)}: {LOW_NOMINAL.vector()} each")
        # One after the other: a host works on one placement at a time.
        for name in LOW:
            await self._finish(await self._create(name, _low_spec(name)))
        hosts = {vm.name: vm.host for vm in await self._client.vms()}
        for name in LOW:
            host = hosts[name] or ""
            self._gauges[name] = Gauge(domain_name(host, name), self._state.uri_of(host))
            self._caches[name] = Cache(name, self._gauges[name], KEYS)
        self._report("waiting for the guests")
        try:
            async with asyncio.timeout(READY_S):
                await asyncio.gather(*(self._ready(name) for name in LOW))
        except TimeoutError as error:
            raise DemoFailed(f"the guests were not ready after {READY_S:g} s") from error

    async def _ready(self, name: str) -> None:
        """Until the guest agent is connected and memcached answers the lab channel."""
        while True:
            try:
                if (await self._client.vm(name)).guest_connected:
                    await self._gauges[name].read()
                    return
            except ReadingError:
                pass  # its services still start
            await asyncio.sleep(_PAUSE_S)

    async def _fill(self, verb: str) -> float:
        """Returns the seconds that it took."""
        begin_s = time.monotonic()
        done = dict.fromkeys(LOW, 0.0)

        def tell(name: str, fraction: float) -> None:
            quarter = int(done[name] * 4)
            done[name] = fraction
            if int(fraction * 4) > quarter:
                self._report(f"{verb} the caches: " + ", ".join(f"{n} {done[n]:.0%}" for n in LOW))

        await asyncio.gather(*(self._caches[name].fill(functools.partial(tell, name)) for name in LOW))
        return time.monotonic() - begin_s

    async def _read_all(self) -> dict[str, Reading]:
        found = await asyncio.gather(*(self._gauges[name].read() for name in LOW))
        return dict(zip(LOW, found, strict=True))

    async def _at_rest(self) -> None:
        """Until the guests are done with the filling, as far as that can be told: a busy one answers late."""
        deadline_s, times = time.monotonic() + REST_S, 0
        while times < QUICK_TIMES and time.monotonic() < deadline_s:
            begin_s = time.monotonic()
            await self._read_all()
            times = times + 1 if time.monotonic() - begin_s < QUICK_S else 0
            await asyncio.sleep(_PAUSE_S)

    async def _read_deflated(self) -> dict[str, Reading]:
        """The readings, once what is resident has come down to the bounds or does so no more."""
        deadline_s = time.monotonic() + FOLLOWS_S
        while True:
            found = await self._read_all()
            if all(checks.resident_follows(name, reading).ok for name, reading in found.items()):
                return found
            if time.monotonic() > deadline_s:
                return found
            await asyncio.sleep(_PAUSE_S)

    async def _sizes(self) -> dict[str, Vector]:
        return {vm.name: vm.current for vm in await self._client.vms()}

    async def _await_restored(self, before: dict[str, Reading]) -> None:
        """Until bound and memcached's limit are back; what is still missing afterwards shows in the checks."""
        self._report(f"waiting for {' and '.join(LOW)} to be back at their nominal size")
        deadline_s = time.monotonic() + self._deadline_s
        while time.monotonic() < deadline_s:
            now = await self._read_all()
            if all(_is_back(before[name], now[name]) for name in LOW):
                return
            await asyncio.sleep(_PAUSE_S)

    async def _finish(self, operation: Operation) -> Operation:
        """Follow an operation to its end. Raises DemoFailed if it did not do what was asked."""
        ended = await self._client.wait(operation, limit_s=self._deadline_s * 4, progress=self._report)
        if ended.state is not OperationState.DONE:
            raise DemoFailed(f"{ended.kind} of {ended.vm} ended {ended.state.value}: {ended.sentence}")
        return ended

    async def _remove(self) -> None:
        """Delete what was begun; an error here must not hide the one that led here."""
        if self._begun:
            self._report("removing the demo's VMs")
        for name in reversed(self._begun):
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await self._delete(name)
            except (EbbError, TimeoutError) as error:
                self._report(f"{name} could not be removed: {error or 'no end in time'}")
        self._begun.clear()

    async def _delete(self, name: str) -> None:
        """Delete one VM, which may still be in the middle of its placement."""
        while True:
            try:
                await self._client.wait(await self._client.delete(name))
                return
            except ManagerRefused as error:
                if error.status == 404:
                    return
                if error.status != 409:
                    raise
            await asyncio.sleep(_PAUSE_S)


def _low_spec(name: str) -> VMSpec:
    return VMSpec(
        name=name,
        priority=Priority.DEFLATABLE,
        nominal=LOW_NOMINAL,
        minimum=LOW_MINIMUM,
        boot_memory_mib=LOW_BOOT_MIB,
    )


def _is_back(before: Reading, now: Reading) -> bool:
    return (
        now.cpus_online == before.cpus_online
        and now.cpu_cores >= before.cpu_cores - checks.CPU_TOLERANCE
        and now.memory_mib >= before.memory_mib - checks.BLOCK_MIB
        and now.memcached_limit_mib >= before.memcached_limit_mib - checks.BLOCK_MIB
    )

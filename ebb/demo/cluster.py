"""`ebb demo --cluster`: two hosts, six guests that come and go, and the ledger of all deflations.

Four low-priority VMs fill both hosts. High-priority VMs arrive and leave, and the low ones shrink and grow for them.
Then the guest of one low VM fills its memory, so that its host falls short of what a last arrival needs: the one
preemption of the script, and its record names the layer that failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from deflation.allocations import Priority
from deflation.messages import HostStatus, ManagedVM, Operation, OperationState, Vector, VMOutcome, VMSpec
from deflation.pages import Event
from deflation.placement_policies import PlacementPolicy
from deflation.reconcile import SLACK
from deflation.resources import ZERO, ResourceVector
from ebb.client import ManagerClient
from ebb.demo import cluster_checks
from ebb.demo.report import Check, ClusterReport, Deflation
from ebb.errors import DemoFailed, EbbError, ReadingError
from ebb.lab.errors import LabError
from ebb.lab.state import LabState
from ebb.readings import Gauge, Reading
from hostagent.hypervisor import domain_name

Report = Callable[[str], None]

#: What each of the two hosts must have; without hardware acceleration a VM costs 320 MiB besides its size.
CAPACITY = ResourceVector(cpu_cores=4, memory_mib=2560)
LOW = ("low-1", "low-2", "low-3", "low-4")
LOW_NOMINAL = Vector(cpu_cores=2, memory_mib=768)
LOW_MINIMUM = Vector(cpu_cores=0.5, memory_mib=448)
HIGH_MEMORY_MIB = 512.0
#: What fills the memory of one guest, MiB: it leaves less than its part of the last arrival's need.
HOG_MIB = 480
DEADLINE_S = 60.0
READY_S = 300.0
_PAUSE_S = 0.5


class ClusterDemo:
    """One run over the lab that ``state`` describes. Its VMs are gone at the end, however it ends."""

    def __init__(self, client: ManagerClient, state: LabState, report: Report) -> None:
        self._client = client
        self._state = state
        self._report = report
        self._begun: list[str] = []
        self._hosts: dict[str, str] = {}
        self._deflations: list[Deflation] = []
        self._most = 0

    async def run(self) -> ClusterReport:
        """Raises DemoFailed or another EbbError if the script cannot be gone through; a failed check is no error."""
        begin_s, begun_at = time.monotonic(), time.time()
        await self._refuse_leftovers()
        try:
            await self._script()
            events = [event for event in await self._client.events(1000) if event.at >= begun_at]
        finally:
            await self._remove()
        return ClusterReport(
            accelerator=self._state.accelerator,
            seconds=round(time.monotonic() - begin_s, 1),
            deflations=tuple(self._deflations),
            preemptions=tuple(event.sentence for event in events if event.kind == "preempted"),
            checks=tuple(self._checks(events)),
        )

    def _checks(self, events: Sequence[Event]) -> list[Check]:
        return [
            *(cluster_checks.adds_up(deflation) for deflation in self._deflations),
            cluster_checks.sums_agree(self._deflations),
            cluster_checks.nobody_for_a_minimum(events),
            cluster_checks.shortfalls_name_a_layer(events),
            Check(name="six guests ran at once", ok=self._most >= 6, detail=f"at most {self._most} ran"),
        ]

    async def _script(self) -> None:
        self._report(f"arrivals: {', '.join(LOW)}")
        await asyncio.gather(*(self._arrive(_spec(name, Priority.DEFLATABLE, LOW_NOMINAL)) for name in LOW))
        await asyncio.gather(*(self._ready(name) for name in LOW))
        first = self._hosts[LOW[0]]
        at_first = [name for name in LOW if self._hosts[name] == first]
        at_second = [name for name in LOW if self._hosts[name] != first]
        if len(at_first) != 2 or len(at_second) != 2:
            raise DemoFailed(f"each host must hold two of the low VMs, but {first} holds {', '.join(at_first)}")
        await self._calm()
        await self._squeeze("high-1", 2.0)
        await self._squeeze("high-2", 2.0)
        for name in ("high-1", "high-2"):
            await self._leave(name)
        # To the minimum and no further: nobody is preempted.
        await self._calm()
        await self._squeeze("high-3", 3.0)
        squeezed = self._hosts["high-3"]
        hog = next(name for name in LOW if self._hosts[name] != squeezed)
        await self._hog(hog)
        await self._squeeze("high-4", 2.0)

    # --- arrivals and departures ---------------------------------------------------------------------------------

    async def _arrive(self, spec: VMSpec) -> Operation:
        self._begun.append(spec.name)
        operation = await self._client.create(spec, policy=PlacementPolicy.FIRST_FIT, deadline_s=DEADLINE_S)
        ended = await self._finish(operation)
        self._hosts[spec.name] = ended.host or ""
        self._most = max(self._most, sum(vm.state == "running" for vm in await self._client.vms()))
        return ended

    async def _squeeze(self, name: str, cpu_cores: float) -> None:
        """A high-priority VM that fits only if others shrink; what they gave, by their ledgers and by readings."""
        self._report(f"arrival: {name} with {cpu_cores:g} cores")
        before = await self._read_all()
        size = Vector(cpu_cores=cpu_cores, memory_mib=HIGH_MEMORY_MIB)
        operation = await self._arrive(_spec(name, Priority.FIXED, size))
        gone = {vm for vm in before if vm not in {row.name for row in await self._client.vms()}}
        if gone:
            # What the preemption freed beyond the need went back to the others: no ledger of a deflation has that.
            for vm in gone:
                self._begun.remove(vm)
            return
        after = await self._read_all()
        # A guest that starts keeps a small machine busy, and nothing is taken from guests that do not answer for it.
        await self._ready(name)
        outcomes = {outcome.name: outcome for outcome in operation.vms}
        for vm, reading in after.items():
            if self._hosts[vm] == operation.host:
                self._deflations.append(_deflation(vm, name, outcomes.get(vm), before[vm], reading))

    async def _leave(self, name: str) -> None:
        self._report(f"departure: {name}")
        await self._finish(await self._client.delete(name))
        self._begun.remove(name)

    async def _hog(self, name: str) -> None:
        """Fill a guest's memory with pages that no layer may take."""
        self._report(f"filling {HOG_MIB} MiB of {name}'s memory")
        code = f"import time; x = bytearray(b'x' * 4096) * {HOG_MIB * 256}; print(len(x), flush=True); time.sleep(3600)"
        wait = "for i in $(seq 240); do [ -s /run/hog ] && exit 0; sleep 0.5; done; exit 1"
        shell = f'python3 -S -c "{code}" > /run/hog 2>&1 & {wait}'
        try:
            async with await self._gauge(name).link() as link:
                done = await link.call("exec", argv=["sh", "-c", shell], timeout_s=125, reply_timeout_s=150)
        except LabError as error:
            raise DemoFailed(f"the memory of {name} could not be filled: {error}") from error
        if done["returncode"] != 0:
            raise DemoFailed(f"the memory of {name} could not be filled: {done['stderr']}")

    async def _ready(self, name: str) -> None:
        """Until the guest agent is connected and the guest answers."""
        try:
            async with asyncio.timeout(READY_S):
                while True:
                    try:
                        if (await self._client.vm(name)).guest_connected:
                            await self._gauge(name).read()
                            return
                    except ReadingError:
                        pass  # its services still start
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError as error:
            raise DemoFailed(f"the guest of {name} was not ready after {READY_S:g} s") from error

    async def _calm(self) -> None:
        """Until no guest is under pressure, as one is that starts on a busy machine: then it gives nothing."""
        try:
            async with asyncio.timeout(READY_S):
                while True:
                    vms = {vm.name: vm for vm in await self._client.vms()}
                    if all(_all_deflatable(host, vms) for host in await self._client.hosts()):
                        return
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError as error:
            raise DemoFailed(f"a guest was still under pressure after {READY_S:g} s") from error

    async def _read_all(self) -> dict[str, Reading]:
        names = [name for name in LOW if name in self._begun]
        found = await asyncio.gather(*(self._gauge(name).read() for name in names))
        return dict(zip(names, found, strict=True))

    def _gauge(self, name: str) -> Gauge:
        return Gauge(domain_name(self._hosts[name], name), self._state.uri)

    async def _finish(self, operation: Operation) -> Operation:
        """Follow an operation to its end. Raises DemoFailed if it did not do what was asked."""
        ended = await self._client.wait(operation, limit_s=DEADLINE_S * 6, progress=self._report)
        if ended.state is not OperationState.DONE:
            raise DemoFailed(f"{ended.kind} of {ended.vm} ended {ended.state.value}: {ended.sentence}")
        return ended

    async def _refuse_leftovers(self) -> None:
        """Other VMs would take part in every split, and smaller hosts would preempt."""
        if others := sorted(vm.name for vm in await self._client.vms() if vm.host is not None):
            raise DemoFailed(f"the lab holds VMs already: {', '.join(others)}")
        hosts = [host.id for host in await self._client.hosts() if host.capacity.vector() == CAPACITY]
        if len(hosts) != 2 or len(self._state.hosts) != 2:
            wanted = "cpu_cores=4,memory_mib=2560"
            raise DemoFailed(f"the script is for two hosts: `ebb lab up --host host-a={wanted} --host host-b={wanted}`")

    async def _remove(self) -> None:
        """Delete what was begun; an error here must not hide the one that led here."""

        async def remove(name: str) -> None:
            try:
                async with asyncio.timeout(DEADLINE_S * 2):
                    await self._client.wait(await self._client.delete(name))
            except (EbbError, TimeoutError) as error:
                self._report(f"{name} could not be removed: {error or 'no end in time'}")

        self._report("removing the VMs")
        await asyncio.gather(*(remove(name) for name in self._begun))
        self._begun.clear()


def _all_deflatable(host: HostStatus, vms: dict[str, ManagedVM]) -> bool:
    """Whether all that a host's low VMs hold above their minimums can be taken, as its agent sees it."""
    low = [vms[name] for name in host.vms if name in vms and vms[name].priority is not Priority.FIXED]
    above = sum((vm.current.vector().less(vm.minimum.vector()) for vm in low), ZERO)
    return above.less(host.deflatable.vector()).fits_in(SLACK)


def _spec(name: str, priority: Priority, nominal: Vector) -> VMSpec:
    minimum = Vector() if priority is Priority.FIXED else LOW_MINIMUM
    return VMSpec(name=name, priority=priority, nominal=nominal, minimum=minimum)


def _deflation(vm: str, cause: str, outcome: VMOutcome | None, before: Reading, after: Reading) -> Deflation:
    ledger = outcome.ledger if outcome is not None else ()
    sizes = (outcome.before, outcome.after) if outcome is not None else (LOW_NOMINAL, LOW_NOMINAL)
    cores = [cluster_checks.cpu_bound(r, size.cpu_cores) for r, size in zip((before, after), sizes, strict=True)]
    return Deflation(
        vm=vm,
        cause=cause,
        ledger=ledger,
        before=Vector(cpu_cores=cores[0], memory_mib=before.memory_mib),
        after=Vector(cpu_cores=cores[1], memory_mib=after.memory_mib),
    )

"""The host: its slice, its VMs, and the operations that a manager or an operator commands.

Operations that change sizes run one after another on a host, the VMs of one operation concurrently. Who gives how much
is decided in :mod:`deflation.proportional`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import psutil
import structlog

from deflation.allocations import check_target, deflatable_capacity, free_capacity
from deflation.cascade import Mode
from deflation.messages import (
    Command,
    CreateCommand,
    HostReport,
    Operation,
    OperationState,
    ReclaimCommand,
    ReinflateCommand,
    TargetCommand,
    Vector,
    VMOutcome,
)
from deflation.proportional import share_room, split_need
from deflation.resources import ZERO, ResourceVector
from hostagent.errors import HypervisorError, RequestRefused
from hostagent.eternal import guarded
from hostagent.hypervisor import DomainState, Hypervisor, domain_name
from hostagent.intents import Cause, Intent, Phase
from hostagent.journal import Journal
from hostagent.operations import Kind, Operations
from hostagent.vms import ManagedVM

#: VMs of one operation that are worked on at the same time.
CONCURRENT: Final = 8
#: How often the VMs are looked at, in seconds.
WATCH_S: Final = 2.0
#: How long a resumed operation waits for its guests to say hello.
GREETING_S: Final = 20.0
_RESIZING: Final = (Phase.DEFLATING, Phase.REINFLATING)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Slice:
    """What of this machine the agent may hand out."""

    host_id: str
    url: str
    capacity: ResourceVector
    accelerator: str
    #: What a VM costs besides its size (docs/contracts.md, accounting), MiB.
    vm_overhead_mib: float
    #: Host memory that is never handed out, whatever the slice says, MiB.
    reserve_mib: float = 512.0


def host_memory_available_mib() -> float:
    """MemAvailable: libvirt's node information misses memory that was plugged into the host later."""
    return float(psutil.virtual_memory().available) / 2**20


@dataclass(slots=True)
class Host:
    """One agent's host. Call :meth:`start` first and :meth:`close` last.

    :param boot_mib: how much of a VM's memory is boot memory, given nominal and wished-for boot memory.
    """

    slice: Slice
    hypervisor: Hypervisor
    journal: Journal
    boot_mib: Callable[[float, float | None], float]
    memory_available_mib: Callable[[], float] = host_memory_available_mib
    vms: dict[str, ManagedVM] = field(default_factory=dict)
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    #: Set whenever the manager should hear of something at once.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    operations: Operations = field(init=False)
    _sizes: asyncio.Lock = field(default_factory=asyncio.Lock)
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)
    _watching: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.operations = Operations(self.slice.host_id)

    async def start(self) -> None:
        """Find our domains and go on with whatever an earlier agent left unfinished."""
        unfinished: dict[str, list[ManagedVM]] = {}
        for found in await self.hypervisor.domains():
            vm = self._adopt(found.name, found.intent, running=found.state == "running")
            cause = found.intent.cause
            if cause is not None:
                unfinished.setdefault(cause.request_id, []).append(vm)
        await self.hypervisor.sweep()
        self.hypervisor.on_lifecycle(lambda domain: self._stirred.set())
        for request_id, members in unfinished.items():
            cause = members[0].intent.cause
            assert cause is not None
            kind: Any = cause.kind
            if any(vm.intent.phase is not Phase.SETTLED for vm in members):
                log.info("resuming", request_id=request_id, vms=[vm.name for vm in members])
            self.operations.begin(
                request_id,
                kind,
                cause.body,
                lambda operation, members=members: self._resume(operation, members),  # type: ignore[misc]
                vm=members[0].name if kind in ("create", "delete", "target") else None,
                started_at=cause.started_at,
            )
        self._watching = asyncio.create_task(guarded(self._watch()), name="watch")

    async def close(self) -> None:
        """Stop working; VMs stay as they are, their intents say what is to go on."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.operations.close()
        await asyncio.gather(*(vm.stop() for vm in self.vms.values()))
        await self.hypervisor.close()

    # --- what there is -------------------------------------------------------------------------------------------

    def free(self) -> ResourceVector:
        """What could be given away now."""
        available = self.memory_available_mib() - self.slice.reserve_mib
        return free_capacity(self.slice.capacity, [vm.allocation() for vm in self.vms.values()], max(available, 0.0))

    def report(self) -> HostReport:
        """What the manager hears of this host."""
        return HostReport(
            id=self.slice.host_id,
            url=self.slice.url,
            incarnation=self.incarnation,
            capacity=Vector.of(self.slice.capacity),
            free=Vector.of(self.free()),
            deflatable=Vector.of(deflatable_capacity(vm.allocation() for vm in self.vms.values())),
            vm_overhead_mib=self.slice.vm_overhead_mib,
            accelerator=self.slice.accelerator,
            vms=tuple(vm.status() for vm in self.vms.values()),
            core_changes=tuple(self.journal.changes[:500]),
        )

    def vm(self, name: str) -> ManagedVM:
        """:raises RequestRefused: there is no such VM here (404)."""
        try:
            return self.vms[name]
        except KeyError:
            raise RequestRefused(404, f"there is no VM {name} on {self.slice.host_id}", "name") from None

    # --- commands ------------------------------------------------------------------------------------------------

    async def create(self, command: CreateCommand) -> Operation:
        """Start a VM at its nominal size.

        :raises RequestRefused: it does not fit, the name is taken, or the request is not acceptable.
        """
        body = _body(command)
        await self._follow(command)
        if known := self.operations.known(command.request_id, "create", body):
            return known
        spec = command.vm
        if spec.name in self.vms:
            raise RequestRefused(409, f"there is a VM {spec.name} on {self.slice.host_id} already", "vm.name")
        nominal = spec.nominal.vector()
        allocation = spec.allocation(nominal, self.slice.vm_overhead_mib)
        free = self.free()
        if not allocation.charge.fits_in(free.larger(_undeclared(self.slice.capacity, nominal))):
            raise RequestRefused(
                409, f"vm.nominal with its overhead ({allocation.charge}) exceeds what is free ({free})", "vm.nominal"
            )
        boot_mib = self.boot_mib(spec.nominal.memory_mib, spec.boot_memory_mib)
        intent = Intent(
            owner=self.slice.host_id,
            spec=spec,
            boot_mib=boot_mib,
            generation=1,
            phase=Phase.CREATING,
            target=spec.nominal,
            committed=spec.nominal,
            cause=self._cause(command, "create", body, ZERO),
        )
        # Charged from this moment on, so that nobody else counts on the room.
        vm = self._adopt(domain_name(self.slice.host_id, spec.name), intent, running=False)
        return self.operations.begin(
            command.request_id, "create", body, lambda operation: self._create(operation, vm, fresh=True), vm=spec.name
        )

    async def delete(self, name: str, command: Command, reason: str) -> Operation:
        """Stop a VM and remove it.

        :raises RequestRefused: no such VM, or the request is not acceptable.
        """
        body = _body(command) | {"name": name, "reason": reason}
        await self._follow(command)
        if known := self.operations.known(command.request_id, "delete", body):
            return known
        vm = self.vm(name)
        return self.operations.begin(
            command.request_id,
            "delete",
            body,
            lambda operation: self._delete(
                operation, vm, self._cause(command, "delete", body, vm.allocation().current)
            ),
            vm=name,
        )

    async def target(self, name: str, command: TargetCommand) -> Operation:
        """Bring one VM to a size.

        :raises RequestRefused: no such VM, an old generation, a target outside its range, or no room to grow.
        """
        body = _body(command) | {"name": name}
        await self._follow(command)
        if known := self.operations.known(command.request_id, "target", body):
            return known
        vm = self.vm(name)
        wanted = command.target.vector()
        check_target(vm.allocation(), wanted)
        cause = vm.intent.cause
        if command.generation == vm.intent.generation and cause is not None and cause.kind == "target":
            earlier = {key: value for key, value in cause.body.items() if key != "request_id"}
            if earlier == {key: value for key, value in body.items() if key != "request_id"}:
                return self.operations.begin(command.request_id, "target", body, self._repeated(vm), vm=name)
        if command.generation <= vm.intent.generation:
            raise RequestRefused(
                409,
                f"generation {command.generation} is not above {vm.intent.generation}, which {name} has",
                "generation",
            )
        if not wanted.less(vm.allocation().current).fits_in(self.free()):
            raise RequestRefused(409, f"target ({wanted}) needs more than what is free ({self.free()})", "target")
        return self.operations.begin(
            command.request_id, "target", body, lambda operation: self._target(operation, vm, command, body), vm=name
        )

    async def reclaim(self, command: ReclaimCommand) -> Operation:
        """Free an amount by deflating this host's VMs in proportion.

        :raises RequestRefused: the request is not acceptable.
        """
        body = _body(command)
        await self._follow(command)
        if known := self.operations.known(command.request_id, "reclaim", body):
            return known
        return self.operations.begin(
            command.request_id, "reclaim", body, lambda operation: self._reclaim(operation, command, body)
        )

    async def reinflate(self, command: ReinflateCommand) -> Operation:
        """Share free room among the VMs that lack something.

        :raises RequestRefused: the request is not acceptable.
        """
        body = _body(command)
        await self._follow(command)
        if known := self.operations.known(command.request_id, "reinflate", body):
            return known
        return self.operations.begin(
            command.request_id, "reinflate", body, lambda operation: self._reinflate(operation, command, body)
        )

    # --- how they run --------------------------------------------------------------------------------------------

    async def _create(self, operation: Operation, vm: ManagedVM, fresh: bool) -> Operation:
        try:
            if fresh:
                await self.hypervisor.create(vm.domain, vm.intent)
            # Admitted at its committed size before its vCPUs run.
            await vm.enforce()
            await self.hypervisor.resume(vm.domain)
            await vm.store(phase=Phase.SETTLED)
        except HypervisorError:
            await self._clear_away(vm)
            raise
        vm.running = True
        vm.start()
        await self._record_change(vm.name, ZERO, vm.allocation().current, operation.request_id)
        sentence = f"{vm.name} runs with {vm.allocation().current}"
        return operation.model_copy(update={"state": OperationState.DONE, "sentence": sentence})

    async def _delete(self, operation: Operation, vm: ManagedVM, cause: Cause) -> Operation:
        async with self._sizes:
            size = vm.allocation().current
            await vm.store(phase=Phase.DELETING, cause=cause)
            await self._forget(vm)
        await self._record_change(vm.name, size, ZERO, operation.request_id)
        reason = cause.body["reason"]
        what = f"preempted {vm.name}, reason {reason}" if reason != "delete" else f"stopped and removed {vm.name}"
        return operation.model_copy(update={"state": OperationState.DONE, "sentence": f"{what}: {size} came free"})

    async def _target(
        self, operation: Operation, vm: ManagedVM, command: TargetCommand, body: dict[str, Any]
    ) -> Operation:
        async with self._sizes:
            cause = self._cause(command, "target", body, vm.allocation().current)
            await vm.prepare(command.target.vector(), cause, command.generation)
            return _ended(operation, [await vm.resize(command.deadline_s, command.mode)])

    async def _reclaim(self, operation: Operation, command: ReclaimCommand, body: dict[str, Any]) -> Operation:
        async with self._sizes:
            need = command.need.vector()
            split = split_need([vm.allocation() for vm in self._settled()], need)
            await self._prepare(split.targets, command, "reclaim", body)
            outcomes = await self._resize(split.targets, command.deadline_s, command.mode)
        return _ended(operation, outcomes, need)

    async def _reinflate(self, operation: Operation, command: ReinflateCommand, body: dict[str, Any]) -> Operation:
        async with self._sizes:
            room = self.free()
            if command.room is not None:
                room = room.smaller(command.room.vector())
            targets = share_room([vm.allocation() for vm in self._settled()], room)
            await self._prepare(targets, command, "reinflate", body)
            return _ended(operation, await self._resize(targets, command.deadline_s))

    async def _resume(self, operation: Operation, members: list[ManagedVM]) -> Operation:
        """Go on with an operation that a killed agent had begun; what had been reached is found in the intents."""
        phases = {vm.intent.phase for vm in members}
        if Phase.CREATING in phases or operation.kind == "create":
            (vm,) = members
            if vm.intent.phase is Phase.SETTLED:
                vm.start()
                return operation.model_copy(update={"state": OperationState.DONE, "sentence": f"{vm.name} runs"})
            if await self._paused(vm):
                return await self._create(operation, vm, fresh=False)
            await self._clear_away(vm)
            raise HypervisorError(f"{vm.name} had not been started when the agent ended; nothing is left of it")
        if Phase.DELETING in phases:
            (vm,) = members
            cause = vm.intent.cause
            assert cause is not None
            return await self._delete(operation, vm, cause)
        for vm in members:
            vm.start()
        async with self._sizes:
            going = [vm for vm in members if vm.intent.phase is not Phase.SETTLED]
            await asyncio.gather(*(vm.greeted(GREETING_S) for vm in going))
            targets = {vm.name: vm.intent.target.vector() for vm in going}
            await self._resize(targets, 60.0)
        need = None
        if operation.kind == "reclaim" and (cause := members[0].intent.cause) is not None:
            need = ReclaimCommand.model_validate(cause.body).need.vector()
        return _ended(operation, [vm.summary() for vm in members], need)

    def _repeated(self, vm: ManagedVM) -> Callable[[Operation], Any]:
        async def answer(operation: Operation) -> Operation:
            async with self._sizes:
                return _ended(operation, [vm.summary()])

        return answer

    async def _prepare(
        self, targets: Mapping[str, ResourceVector], command: Command, kind: Kind, body: dict[str, Any]
    ) -> None:
        """Write all intents before the first action: a kill in between leaves each VM at its old size or its target."""
        for name, target in targets.items():
            vm = self.vms[name]
            await vm.prepare(target, self._cause(command, kind, body, vm.allocation().current))

    async def _resize(
        self, targets: Mapping[str, ResourceVector], deadline_s: float, mode: Mode = Mode.ASK
    ) -> list[VMOutcome]:
        """Resize VMs concurrently. One that fails is reported by its shortfall and stays with its intent."""
        slots = asyncio.Semaphore(CONCURRENT)

        async def one(vm: ManagedVM) -> VMOutcome:
            async with slots:
                try:
                    return await vm.resize(deadline_s, mode)
                except HypervisorError as error:
                    return vm.failed(str(error))

        return list(await asyncio.gather(*(one(self.vms[name]) for name in targets if name in self.vms)))

    # --- helpers -------------------------------------------------------------------------------------------------

    def _adopt(self, domain: str, intent: Intent, running: bool) -> ManagedVM:
        vm = ManagedVM(
            domain, intent, self.slice.host_id, self.hypervisor, self.slice.vm_overhead_mib, self._record_change
        )
        vm.running = running
        self.vms[vm.name] = vm
        return vm

    async def _forget(self, vm: ManagedVM) -> None:
        await vm.stop()
        await self.hypervisor.destroy(vm.domain)
        self.vms.pop(vm.name, None)
        self.changed.set()

    async def _clear_away(self, vm: ManagedVM) -> None:
        """Remove a VM that could not be started; where even that fails, it stays charged and is tried again."""
        vm.intent = vm.intent.changed(phase=Phase.DELETING)
        try:
            await self._forget(vm)
        except HypervisorError as error:
            log.warning("what was left of the VM could not be removed yet", vm=vm.name, why=str(error))

    def _settled(self) -> list[ManagedVM]:
        """VMs whose size may be changed now."""
        return [vm for vm in self.vms.values() if vm.intent.phase is Phase.SETTLED and vm.running]

    async def _paused(self, vm: ManagedVM) -> bool:
        return any(found.name == vm.domain and found.state == "paused" for found in await self.hypervisor.domains())

    async def _follow(self, command: Command) -> None:
        """Refuse a manager whose leadership is over, and remember the epoch of one that leads.

        :raises RequestRefused: the epoch is lower than one that was seen.
        """
        if command.epoch < self.journal.epoch:
            raise RequestRefused(
                409, f"epoch {command.epoch} is over: the manager with epoch {self.journal.epoch} leads", "epoch"
            )
        if command.epoch > self.journal.epoch:
            await asyncio.to_thread(self.journal.raise_epoch, command.epoch)

    def _cause(self, command: Command, kind: Kind, body: dict[str, Any], before: ResourceVector) -> Cause:
        return Cause(
            request_id=command.request_id, kind=kind, body=body, started_at=time.time(), before=Vector.of(before)
        )

    async def _record_change(self, name: str, before: ResourceVector, after: ResourceVector, cause: str) -> None:
        if before.cpu_cores != after.cpu_cores:
            await asyncio.to_thread(
                self.journal.add, name, self.slice.host_id, time.time(), before.cpu_cores, after.cpu_cores, cause
            )
        self.changed.set()

    async def _watch(self) -> None:
        """Look at each VM now and then, and at once when libvirt says that a domain has started or stopped."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._stirred.wait()
            self._stirred.clear()
            try:
                await self._refresh()
            except HypervisorError as error:
                log.warning("the VMs could not be looked at", why=str(error))

    async def _refresh(self) -> None:
        """See which VMs run, go on with resizes that failed, and check on parked vCPUs."""
        if self._sizes.locked():
            return
        async with self._sizes:
            found = {domain.name: domain for domain in await self.hypervisor.domains()}
            for vm in list(self.vms.values()):
                await self._look_at(vm, found.pop(vm.domain, None))
            for domain in found.values():
                # A creation that was given up, but libvirt carried it out in the end.
                log.warning("removing a domain of ours that no VM belongs to", domain=domain.name)
                await self.hypervisor.destroy(domain.name)
            stuck = [vm for vm in self.vms.values() if vm.running and vm.intent.phase in _RESIZING]
            await self._resize({vm.name: vm.intent.target.vector() for vm in stuck}, 60.0)
        await asyncio.gather(*(vm.watch() for vm in list(self.vms.values())))

    async def _look_at(self, vm: ManagedVM, domain: DomainState | None) -> None:
        if vm.intent.phase is Phase.CREATING:
            return
        if vm.intent.phase is Phase.DELETING:
            await self._forget(vm)
            return
        running = domain is not None and domain.state == "running"
        if running != vm.running:
            log.info("the VM started" if running else "the VM stopped", vm=vm.name)
            vm.running = running
            self.changed.set()
        if domain is None:
            log.warning("the VM's domain was removed by somebody else", vm=vm.name)
            await self._record_change(vm.name, vm.allocation().current, ZERO, "removed by somebody else")
            await self._forget(vm)


def _body(command: Command) -> dict[str, Any]:
    """The command as it is compared and stored; a new leader repeats it under its own epoch."""
    return command.model_dump(mode="json", exclude={"epoch"})


def _undeclared(capacity: ResourceVector, nominal: ResourceVector) -> ResourceVector:
    """What a VM may ask for in components that the host does not declare: anything."""
    return ResourceVector(
        disk_mib_s=0.0 if capacity.disk_mib_s > 0 else nominal.disk_mib_s,
        network_mib_s=0.0 if capacity.network_mib_s > 0 else nominal.network_mib_s,
    )


def _ended(operation: Operation, outcomes: list[VMOutcome], need: ResourceVector | None = None) -> Operation:
    """An operation's record at its end: what all its VMs came to, in one sentence."""
    freed = sum((o.before.vector().less(o.after.vector()) for o in outcomes), ZERO)
    missing = sum((o.shortfall.vector() for o in outcomes), ZERO) if need is None else need.less(freed)
    short = ResourceVector(*(v if v > limit else 0.0 for v, limit in zip(missing, (0.005, 1.0, 0.5, 0.5), strict=True)))
    state = OperationState.DONE if short.is_zero() else OperationState.PARTIAL
    details = "; ".join(f"{o.name} {o.sentence}" for o in outcomes) or "no VM had anything to give or to get"
    sentence = details if short.is_zero() else f"short of {short}: {details}"
    return operation.model_copy(
        update={"state": state, "sentence": sentence, "vms": tuple(outcomes), "shortfall": Vector.of(short)}
    )

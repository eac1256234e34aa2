"""Dry runs of commands: the same checks, the same split, fresh readings, and nothing changed or remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, Literal

from ebbtide.deflation.cascade.forecast import forecast, tell
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.cascade.outcomes import beyond_rounding
from ebbtide.deflation.modes import HostEvent, refusal
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.deflation.sharing.proportional import split_need
from ebbtide.messages.commands import ReclaimCommand, ReinflateCommand, TargetCommand
from ebbtide.messages.common import RequestId, Vector
from ebbtide.messages.dry_runs import Forecast, VMForecast
from hostagent.control.harvest import Harvest
from hostagent.control.start_admission import reinflation_targets
from hostagent.operations.explain import survey
from hostagent.operations.size_commands import SizeCommands, target_event
from hostagent.vm.host import Host
from hostagent.vm.managed_vm import ManagedVM

#: VMs that are read at the same time.
CONCURRENT: Final = 8


class DryRun:
    """Answers commands that carry ``dry_run``. No epoch is checked: every caller that may read may ask."""

    def __init__(self, host: Host, size_commands: SizeCommands, harvest: Harvest) -> None:
        self._host = host
        self._size_commands = size_commands
        self._harvest = harvest

    async def target(self, name: str, command: TargetCommand) -> Forecast:
        """What bringing one VM to a size would come to.

        :raises RequestRefused: as the command itself, but for the host's mode.
        :raises InvalidField: a target outside its range.
        """
        await self._host.sample()
        vm = self._host.vm(name)
        self._size_commands.check_target(vm, command, self._harvest.spare(name))
        self._host.check_resizable(vm)
        targets, event = {name: command.target.size_of(vm.allocation())}, target_event(vm, command)
        return await self._answer(command.request_id, "target", targets, command.deadline_s, event)

    async def reclaim(self, command: ReclaimCommand) -> Forecast:
        """Who would give how much."""
        need = command.need.vector()
        rows = [vm.row() for vm in self._host.resizable() if vm.name not in command.exclude]
        targets = split_need(rows, need).targets
        return await self._answer(
            command.request_id, "reclaim", targets, command.deadline_s, HostEvent.RECLAIM, need=need
        )

    async def reinflate(self, command: ReinflateCommand) -> Forecast:
        """Who would get how much."""
        await self._host.sample()
        targets = reinflation_targets(self._host, self._host.resizable(), command)
        return await self._answer(command.request_id, "reinflate", targets, command.deadline_s, HostEvent.REINFLATE)

    async def _answer(
        self,
        request_id: RequestId,
        kind: Literal["target", "reclaim", "reinflate"],
        targets: Mapping[str, ResourceVector],
        deadline_s: float,
        event: HostEvent,
        need: ResourceVector | None = None,
    ) -> Forecast:
        slots = asyncio.Semaphore(CONCURRENT)

        async def one(name: str, target: ResourceVector) -> VMForecast:
            async with slots:
                return await self._one(self._host.vm(name), target, deadline_s)

        vms = await asyncio.gather(*(one(name, target) for name, target in targets.items()))
        freed = sum((vm.now.vector().less(vm.expected.vector()) for vm in vms), ZERO)
        missing = beyond_rounding(
            sum((vm.shortfall.vector() for vm in vms), ZERO) if need is None else need.less(freed)
        )
        details = "; ".join(f"{vm.name} {vm.sentence}" for vm in vms) or "no VM has anything to give or to get"
        if not missing.is_zero():
            details = f"short of {missing}: {details}"
        modes = self._host.modes
        if why := refusal(self._host.slice.host_id, modes.mode, modes.reason, event):
            details = f"would be refused now: {why}. Otherwise: {details}"
        return Forecast(
            request_id=request_id,
            kind=kind,
            host=self._host.slice.host_id,
            vms=tuple(vms),
            shortfall=Vector.of(missing),
            sentence=details,
        )

    async def _one(self, vm: ManagedVM, target: ResourceVector, deadline_s: float) -> VMForecast:
        found = await survey(self._host.hypervisor, vm)
        present = found.present(vm.intent)
        current = vm.allocation().current
        if present is None:
            return _untouched(vm, current, target, "would not be touched: its size cannot be read")
        if vm.pressure.sentence and not present.bound.size.fits_in(target):
            return _untouched(vm, present.bound.size, target, f"would be shrunk no further: {vm.pressure.sentence}")
        outcomes = forecast(present, target, deadline_s)
        sentence = tell(outcomes, present.mechanisms.has(Mechanism.APPLICATION))
        return VMForecast.of(vm.name, Vector.of(current), outcomes, sentence)


def _untouched(vm: ManagedVM, now: ResourceVector, target: ResourceVector, sentence: str) -> VMForecast:
    """A VM to which nothing would be done."""
    return VMForecast(
        name=vm.name,
        current=vm.intent.committed,
        now=Vector.of(now),
        target=Vector.of(target),
        expected=Vector.of(now),
        shortfall=Vector.of(now.less(target) + target.less(now)),
        rows=(),
        sentence=sentence,
    )

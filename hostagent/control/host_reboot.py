"""A boot of the host that no agent has seen: VMs that libvirt has started since then work from that boot on.

They run and are settled, so that nothing else tells them from those that have run through the agent's absence. What
they hold is charged, and put right, as of any VM that was restarted while no agent looked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import structlog

from ebbtide.deflation.resources import ZERO
from ebbtide.messages.explanations import DecisionKind
from hostagent.errors import HypervisorError, JournalError
from hostagent.libvirt.hypervisor import DomainState
from hostagent.state.host_boot import HostBoot
from hostagent.state.intents import Phase
from hostagent.vm.host import RESIZING, Host
from hostagent.vm.managed_vm import ManagedVM

log = structlog.get_logger()


def was_off(found: DomainState, boot: HostBoot) -> bool:
    """Whether a domain that runs was off when its host booted, by no command, with its VM counting as running.

    One that was started after the boot is known by its time: that boot could not be written down then.
    """
    since = found.intent.started_at
    counts_as_running = found.intent.phase in (Phase.SETTLED, *RESIZING)
    return found.state == "running" and counts_as_running and (since is None or since < boot.at)


async def see_reboot(host: Host, domains: Iterable[DomainState]) -> None:
    """Tell of the VMs that were off since the agent was here last, once for each boot of the host.

    Before anything is begun with them.
    """
    boot, journal = host.boot, host.journal
    if not boot.id or boot.id == journal.boot_id:
        return
    try:
        if journal.boot_id:
            for found in domains:
                vm = host.vms[found.intent.spec.name]
                if vm.domain == found.name and was_off(found, boot):
                    await _started_anew(host, vm, found.goes_on)
        # Last: a kill before it has all of this done again.
        await asyncio.to_thread(journal.set_boot, boot.id)
    except JournalError as error:
        log.warning("which VMs were started again with their host is not written down yet", why=str(error))


async def _started_anew(host: Host, vm: ManagedVM, goes_on: bool) -> None:
    """:raises JournalError: it could not be told."""
    size, cause = vm.allocation().current, f"its host was started again ({host.boot.id[:8]})"
    if not host.journal.has_told(vm.name, cause, size.cpu_cores):
        if host.journal.last_cores(vm.name):  # else its end was told as the host went down
            await host.record_change(vm.name, size, ZERO, cause)
        await host.record_change(vm.name, ZERO, size, cause)
    sentence = "it was started again with its host, and "
    if goes_on:
        sentence += "goes on where it was saved"
    else:
        sentence += "its work counts from then on"
        async with vm.lock:
            vm.record.intent = vm.intent.changed(started_at=host.boot.at)
            # What cannot be written now, the reconciler writes later.
            with contextlib.suppress(HypervisorError):
                await vm.record.persist()
    host.note(vm.name, DecisionKind.ADMIT, sentence, {"booted_at": host.boot.at})

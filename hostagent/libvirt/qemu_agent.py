"""CPUs of guests that run qemu-guest-agent and nothing of ours: which are on line, and off and on by an explicit map.

A stopped agent holds a connection up for seconds a call (docs/internals/contracts.md, concurrency with libvirt), so
these calls have connections of their own, a time limit each, and one that was not answered is followed by a pause that
doubles. Nothing else is asked of the agent; file systems are never frozen.
https://libvirt.org/html/libvirt-libvirt-domain.html#virDomainSetGuestVcpus
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Final

import libvirt
import structlog

from ebbtide.deflation.cascade.reconcile import RepairPace
from ebbtide.messages.common import cleaned_text
from ebbtide.messages.guest import MAX_TEXT
from hostagent.errors import DomainGone, HypervisorError
from hostagent.libvirt.hypervisor import GuestCpus
from hostagent.libvirt_connection import LibvirtConnection

#: After this, in seconds, libvirt gives up on an agent, and we on libvirt.
ANSWER_S: Final = 5
CALL_LIMIT_S: Final = 7.0
#: A guest of more vCPUs than this is not believed.
MOST_CPUS: Final = 4096

log = structlog.get_logger()


class QemuAgents:
    """The qemu-guest-agents of all domains, each with a breaker."""

    def __init__(self, uri: str, opener: Callable[[str], Any] = libvirt.open) -> None:
        self._connection = LibvirtConnection(uri, opener)
        self._paces: dict[str, RepairPace] = {}

    async def cpus(self, domain: str) -> GuestCpus | None:
        """Which CPUs are on line by the guest's word; None: it does not answer, or is left alone for a while.

        :raises DomainGone: there is no such domain.
        """
        answer, _ = await self._ask(domain, _read)
        return answer

    async def bring(self, domain: str, online: Collection[int]) -> str:
        """Have these CPUs on line and no others.

        :returns: why that was not tried or has failed; empty if it was done. What has come of it is to be read.
        :raises DomainGone: there is no such domain.
        """

        def bring(found: Any) -> GuestCpus:
            said = _read(found)
            now = set(said.online)
            for cpus, state in ((set(online) - now, 1), (now - set(online) - {0}, 0)):
                if cpus:
                    found.setGuestVcpus(",".join(map(str, sorted(cpus))), state, 0)
            return said

        _, why = await self._ask(domain, bring)
        return why

    async def close(self) -> None:
        """Close the connections; calls that hang are left to their threads."""
        await self._connection.close()

    async def _ask(self, domain: str, question: Callable[[Any], GuestCpus]) -> tuple[GuestCpus | None, str]:
        """The answer, or why there is none."""
        pace, now = self._paces.setdefault(domain, RepairPace()), asyncio.get_running_loop().time()
        if not pace.due(now):
            return None, f"qemu-guest-agent has not answered and is left alone for {pace.not_before - now:.0f} s"

        def ask(found: Any) -> GuestCpus:
            found.agentSetResponseTimeout(ANSWER_S, 0)
            return question(found)

        try:
            answer = await self._connection.change(domain, ask, CALL_LIMIT_S)
        except DomainGone:
            self._paces.pop(domain, None)  # another call may have found so
            self._connection.forget(domain)
            raise
        except HypervisorError as error:
            pace.tried(asyncio.get_running_loop().time())
            why = cleaned_text(str(error), MAX_TEXT)  # libvirt passes on what the guest says of it
            log.info("qemu-guest-agent is left alone for a while", domain=domain, why=why, s=pace.pause_s / 2)
            return None, f"qemu-guest-agent did not do it: {why}"
        pace.held()
        return answer, ""


def _read(domain: Any) -> GuestCpus:
    """:raises HypervisorError: what the agent said makes no sense."""
    said = domain.guestVcpus()
    if said is None:  # libvirt-python 9.0 says so of an agent that has not answered in time
        raise HypervisorError("qemu-guest-agent did not answer in time")
    online = cpu_numbers(str(said.get("online", "")))
    if not online:
        raise HypervisorError("qemu-guest-agent names no CPU that is on line")
    takeable = set(cpu_numbers(str(said.get("offlinable", "")))) & set(online) - {0}
    return GuestCpus(online, tuple(sorted(takeable, reverse=True)))


def cpu_numbers(text: str) -> tuple[int, ...]:
    """The CPUs of a list like ``0-2,5``, in order.

    :raises HypervisorError: it is no such list, or names more than there can be.
    """
    found: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            if not 0 <= int(first) <= int(last or first) < MOST_CPUS:
                raise ValueError(part)
            found.update(range(int(first), int(last or first) + 1))
    except ValueError as error:
        raise HypervisorError(f"qemu-guest-agent gave a list of CPUs that is none: {text[:100]!r}") from error
    return tuple(sorted(found))

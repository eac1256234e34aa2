"""qemu-guest-agent: CPUs by an explicit map, and an agent that does not answer is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import libvirt
import pytest

from ebbtide.messages.guest import MAX_TEXT
from hostagent.errors import DomainGone, HypervisorError
from hostagent.libvirt.hypervisor import GuestCpus
from hostagent.libvirt.qemu_agent import ANSWER_S, QemuAgents, cpu_numbers


class Domain:
    """A domain with four vCPUs whose agent answers, or not; and the connection to it."""

    def __init__(self) -> None:
        self.online = {0, 1, 2, 3}
        self.offlinable = "1-3"
        self.silent = False
        self.calls: list[str] = []
        self.limits: list[int] = []

    def isAlive(self) -> bool:
        return True

    def setKeepAlive(self, interval: int, count: int) -> None:
        pass

    def close(self) -> None:
        pass

    def lookupByName(self, name: str) -> Domain:
        if name == "gone":
            error = libvirt.libvirtError("no such domain")
            error.err = (libvirt.VIR_ERR_NO_DOMAIN,) + (0,) * 8
            raise error
        return self

    def agentSetResponseTimeout(self, seconds: int, flags: int) -> None:
        self.limits.append(seconds)

    def _answers(self, call: str) -> None:
        self.calls.append(call)
        if self.silent:
            raise libvirt.libvirtError("Guest agent is not responding")

    def guestVcpus(self) -> dict[str, str]:
        self._answers("get")
        return {"vcpus": "0-3", "online": ",".join(map(str, sorted(self.online))), "offlinable": self.offlinable}

    def setGuestVcpus(self, cpus: str, state: int, flags: int) -> None:
        self._answers(f"set {cpus} {state}")
        found = set(cpu_numbers(cpus))
        self.online = self.online | found if state else self.online - found


@pytest.fixture
def domain() -> Domain:
    return Domain()


@pytest.fixture
async def agents(domain: Domain) -> AsyncIterator[QemuAgents]:
    found = QemuAgents("test:///", lambda uri: domain)
    yield found
    await found.close()


async def test_cpus_are_taken_from_the_last_and_never_the_first(agents: QemuAgents, domain: Domain) -> None:
    domain.offlinable = "0-3"
    assert await agents.cpus("web") == GuestCpus((0, 1, 2, 3), (3, 2, 1))
    assert domain.limits == [ANSWER_S]


async def test_a_map_is_reached_by_what_differs_and_leaves_cpu_0_alone(agents: QemuAgents, domain: Domain) -> None:
    assert await agents.bring("web", (0, 1)) == ""
    assert domain.online == {0, 1}
    assert await agents.bring("web", (2,)) == ""
    assert domain.online == {0, 2}
    assert domain.calls == ["get", "set 2,3 0", "get", "set 2 1", "set 1 0"]


async def test_an_agent_that_does_not_answer_is_left_alone_and_no_other_with_it(
    agents: QemuAgents, domain: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain.silent = True
    assert await agents.cpus("web") is None
    assert "left alone for 4 s" in await agents.bring("web", (0,))
    assert await agents.cpus("web") is None
    assert domain.calls == ["get"], "it was asked once"
    domain.silent = False
    assert await agents.cpus("other") is not None
    assert await agents.cpus("web") is None
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now + 5.0)
    assert await agents.cpus("web") is not None


async def test_a_domain_that_is_gone_is_no_silent_agent(agents: QemuAgents) -> None:
    found = await asyncio.gather(agents.cpus("gone"), agents.cpus("gone"), return_exceptions=True)
    assert [type(error) for error in found] == [DomainGone, DomainGone]


@pytest.mark.parametrize(
    ("text", "numbers"), [("", ()), ("0", (0,)), ("0-2,5", (0, 1, 2, 5)), ("3,1", (1, 3)), ("0-0", (0,))]
)
def test_lists_of_cpus_are_read(text: str, numbers: tuple[int, ...]) -> None:
    assert cpu_numbers(text) == numbers


@pytest.mark.parametrize("text", ["x", "-1", "2-1", "0-99999999999", "1;2"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(HypervisorError):
        cpu_numbers(text)


async def test_an_agent_that_libvirt_has_given_up_on_is_left_alone(agents: QemuAgents, domain: Domain) -> None:
    domain.guestVcpus = lambda: None  # type: ignore[method-assign, assignment, return-value]
    assert await agents.cpus("web") is None
    assert "left alone" in await agents.bring("web", (0,))


async def test_what_an_agent_says_of_its_failure_can_be_stored_and_shown_and_is_cut(
    agents: QemuAgents, domain: Domain
) -> None:
    def refuses(cpus: str, state: int, flags: int) -> None:
        raise libvirt.libvirtError("no \ud800 \x1b[2J \u202e way " + "long " * 5000)

    domain.setGuestVcpus = refuses  # type: ignore[method-assign]
    why = await agents.bring("web", (0,))
    assert why.startswith("qemu-guest-agent did not do it: no ")
    assert why.isprintable()
    assert len(why) < MAX_TEXT + 50


async def test_a_guest_that_says_nonsense_says_nothing(agents: QemuAgents, domain: Domain) -> None:
    def nonsense() -> dict[str, Any]:
        return {"online": "0-99999999999"}

    domain.guestVcpus = nonsense  # type: ignore[method-assign]
    assert await agents.cpus("web") is None

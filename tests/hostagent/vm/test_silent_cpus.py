"""CPU of a VM whose guest is silent, and which nobody has heard say which CPUs are on line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.deflation.bounds import EMULATOR_SHARE
from hostagent.errors import HypervisorError
from hostagent.vm.host import Host
from tests.hostagent.conftest import Command
from tests.hostagent.doing import reclaim
from tests.hostagent.fake_hypervisor import FakeHypervisor
from tests.hostagent.world import Domain
from tests.waiting import until


@pytest.mark.parametrize(("has_channel", "quota"), [(True, None), (False, 2.0 / 3)])
async def test_where_no_word_was_heard_the_cap_alone_holds_a_guest_that_has_an_agent(
    command: Command,
    two_vms: list[Domain],
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    has_channel: bool,
    quota: float | None,
) -> None:
    """One without has put no CPU off line."""

    async def find(self: FakeHypervisor, domain: str) -> Path | None:
        if has_channel:
            raise HypervisorError("its domain does not say")
        return None

    monkeypatch.setattr(FakeHypervisor, "guest_channel", find)
    for vm in host.vms.values():
        vm.link.hang_up()
    await until(lambda: all(vm.link.has_channel is has_channel and not vm.link.connected for vm in host.vms.values()))
    for vm in host.vms.values():
        vm.link.online = None
    operation = await reclaim(command, cpu_cores=2.0)
    assert operation.shortfall.cpu_cores == 0
    assert [domain.quota for domain in two_vms] == [None if quota is None else pytest.approx(quota)] * 2
    assert [domain.cap for domain in two_vms] == [pytest.approx(2.0 * (1 + EMULATOR_SHARE))] * 2

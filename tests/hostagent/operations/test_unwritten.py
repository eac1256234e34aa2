"""What cannot be written down because the journal's disk is full is not begun."""

from __future__ import annotations

import pytest

from ebbtide.deflation.resources import ZERO, ResourceVector
from hostagent.errors import JournalError
from hostagent.state.intents import Intent
from hostagent.vm.host import Host
from tests.hostagent.conftest import Command
from tests.hostagent.world import Domain, World
from tests.waiting import until

FULL = ResourceVector(3.0, 1024.0)


@pytest.mark.parametrize("unwritten", ["add", "add_deleted"])
@pytest.mark.parametrize("state", ["running", "told", "off"])
async def test_a_deletion_that_cannot_be_written_down_is_not_carried_out_once_there_is_room_to_write(
    command: Command,
    host: Host,
    two_vms: list[Domain],
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    unwritten: str,
    state: str,
) -> None:
    def full(*_: object) -> None:
        raise JournalError("no space left on device")

    if off := state == "off":
        assert (await command("POST", "/v1/vms/low-1/stop", {"request_id": "s", "limit_s": 2.0})).state == "done"
    domain, vm = two_vms[0], host.vms["low-1"]
    before, notice = vm.intent, "&notice_s=1&reason=minimum" if state == "told" else ""
    with monkeypatch.context() as broken:
        broken.setattr(host.journal, "add_deleted", full)
        broken.setattr(host.journal, unwritten, full)
        gone = await command("DELETE", f"/v1/vms/low-1?request_id=d{notice}")
        assert (gone.state, gone.sentence) == ("failed", "no space left on device")
    looked = world.calls.count(("survey", ""))
    await until(lambda: world.calls.count(("survey", "")) > looked + 4)
    await until(lambda: set(world.withdrawn) == ({"d"} if state == "told" else set()) and not vm.lock.locked())
    assert host.vms["low-1"] is vm
    assert (domain.state, vm.allocation().current) == ("stopped", ZERO) if off else ("running", FULL)
    stored = Intent.model_validate_json(domain.intent)
    assert (stored.phase, stored.cause) == (before.phase, before.cause)
    assert host.journal.last_cores("low-1") == (0.0 if off else 3.0)
    assert (await command("DELETE", "/v1/vms/low-1?request_id=d-2")).state == "done"
    assert list(world.domains) == ["ebb-host-a.low-2"]

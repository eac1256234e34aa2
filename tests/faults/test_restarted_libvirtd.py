"""libvirtd is restarted; real guests, which live through it (docs/reference/faults.md)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ebbtide.lab import services
from ebbtide.lab.state import LabState
from tests.faults.ward import LOW, Ward

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]


async def test_a_libvirtd_that_is_restarted_in_the_middle_is_an_ordinary_event(
    ward: Ward, libvirt_services: LabState, tmp_path: Path
) -> None:
    request_id = await ward.begin_target(1.5, 480)
    await ward.until_falling()
    await asyncio.to_thread(services.restart_libvirtd, libvirt_services, tmp_path, lambda: None)
    operation = await ward.ended(request_id)
    assert operation.state.value in ("done", "partial"), operation.sentence
    await ward.settled()
    await ward.connected()
    await ward.hold()
    again = await ward.target(1.0, 440)
    assert again.state.value == "done", again.sentence
    await ward.hold()
    assert ward.host.vm(LOW).status().current.cpu_cores == pytest.approx(1.0, abs=0.011)

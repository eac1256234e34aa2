"""What several tests of the host agent do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import Operation
from hostagent.state.intents import Phase
from hostagent.vm.host import Host
from tests.hostagent.conftest import Client, Command
from tests.waiting import until


async def reclaim(command: Command, **need: float) -> Operation:
    return await command("POST", "/v1/reclaims", {"request_id": "reclaim", "need": need, "deadline_s": 30.0})


async def report(client: Client) -> HostReport:
    response = await client.get("/v1/host")
    return HostReport.model_validate_json(await response.text())


async def host_idle(host: Host) -> None:
    await until(lambda: all(not v.lock.locked() and v.intent.phase is Phase.SETTLED for v in host.vms.values()))


@contextlib.contextmanager
def unseen(host: Host) -> Iterator[None]:
    """What happens to its domains past the agent is seen only at the end."""
    at_the_end, survey = asyncio.Event(), host.hypervisor.survey

    async def later() -> Any:
        await at_the_end.wait()
        return await survey()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(host.hypervisor, "survey", later)
        yield
    at_the_end.set()

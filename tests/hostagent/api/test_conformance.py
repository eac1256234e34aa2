"""The host agent's API against the document that it serves: no 5xx, no undocumented answer, wrong data refused."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from ebbtide.cli import conformance
from ebbtide.deflation import fencing
from ebbtide.messages.common import LARGEST
from hostagent.api.app import make_app
from hostagent.operations.agent import Agent
from hostagent.state.intents import Phase
from tests import schema_run
from tests.hostagent.conftest import TOKEN, low_vm
from tests.hostagent.fake_moves import ADDRESS, FakeMoves
from tests.hostagent.world import World
from tests.waiting import until

#: What needs a VM in a state that random requests seldom leave it in: adopted, running.
BY_HAND: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/adoptions", {"domain": "Old", "name": "old"}),
    ("POST", "/v1/vms/old/release", {}),
    (
        "POST",
        "/v1/vms/coming/arrival",
        {
            "vm": low_vm("coming", nominal={"cpu_cores": 0.5, "memory_mib": 512.0}, minimum={}),
            "size": {"cpu_cores": 0.5, "memory_mib": 512.0},
            "boot_memory_mib": 384.0,
            "uuid": str(uuid.UUID(int=7)),
        },
    ),
    ("POST", "/v1/vms/low-1/departure", {"to": "host-b", "address": ADDRESS.model_dump()}),
    ("POST", "/v1/vms/web/withdrawal", {"preemption": "a-notice"}),
    ("PUT", "/v1/vms/web/target", {"generation": 2, "target": {"cpu_cores": 1.0, "memory_mib": 1024.0}}),
]


async def test_what_may_be_asked_is_answered_as_documented(
    agent: Agent, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: schema_run.Seen = Counter()
    hypervisor: Any = agent.host.hypervisor
    hypervisor.moves = FakeMoves(hypervisor._call)
    app = schema_run.watch(make_app(agent, TOKEN), seen)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        for name in ("web", "low-1"):
            vm = low_vm(name, nominal={"cpu_cores": 2.0, "memory_mib": 1024.0})
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with aiohttp.request(
                "POST", f"{url}/v1/vms", json={"request_id": f"c-{name}", "vm": vm}, headers=headers
            ) as response:
                assert response.status == 202, await response.text()
            await until(lambda: all(vm.intent.phase is Phase.SETTLED for vm in agent.host.vms.values()))
        await world.create("Old", "")
        world.domains["Old"].state = "running"
        agent.host.vms["web"].notice.request_id = "a-notice"
        for number, (method, path, body) in enumerate(BY_HAND):
            body = {"request_id": f"by-hand-{number}", **body}
            async with aiohttp.request(method, f"{url}{path}", json=body, headers=headers) as response:
                assert response.status == 202, await response.text()
            await agent.requests.operations.ended(f"by-hand-{number}")
        agent.host.vms["web"].notice.request_id = ""
        names: dict[str, list[str | int]] = {"path.name": ["web", "low-1"], "path.request_id": ["c-web", "c-low-1"]}
        # Bodies raise the epoch as far as it goes; a deletion of an older manager is refused.
        monkeypatch.setattr(fencing, "MOST_STEP", LARGEST)
        names["query.epoch"] = [LARGEST]
        names["query.request_id"] = [f"delete-{number}" for number in range(50)]
        await schema_run.run(url, TOKEN, tmp_path, names=names, max_examples=15)
        assert schema_run.unreached(app, seen) == [], sorted(seen.items())


async def test_it_is_what_managers_rely_on(agent: Agent) -> None:
    async with TestServer(make_app(agent, TOKEN)) as server:
        checks = await conformance.examine(str(server.make_url("")), TOKEN)
    assert [(check.name, check.why) for check in checks if not check.ok] == []
    assert len(checks) == len(conformance.CHECKS)

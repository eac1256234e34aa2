"""A real guest that starts deflated, and grows beyond its nominal size within the budget that the manager grants."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from ebbtide.messages.commands import BudgetStatus
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.vms import VMState, VMStatus
from tests.guests.conftest import RunningLab
from tests.guests.test_demo import virsh
from tests.guests.test_modes import quota_us
from tests.waiting import until

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

NAME = "spare"
VM = {
    "name": NAME,
    "priority": "harvest",
    "nominal": {"cpu_cores": 1.5, "memory_mib": 640.0},
    "minimum": {"cpu_cores": 0.5, "memory_mib": 400.0},
    "ceiling": {"cpu_cores": 2.0, "memory_mib": 768.0},
}
#: Of the lab's manager, which has told it to the agent by answering its reports.
EPOCH = 1
INITIAL = {"cpu_cores": 1.0, "memory_mib": 512.0}

Ask = Callable[..., Awaitable[str]]


async def test_a_harvest_vm_starts_deflated_and_grows_to_its_ceiling(lab: RunningLab) -> None:
    host = lab.state.hosts[0]
    domain = f"ebb-{host.id}.{NAME}"
    headers = {"Authorization": f"Bearer {host.token_file.read_text().strip()}"}
    async with aiohttp.ClientSession(host.url, headers=headers) as session:

        async def ask(method: str, path: str, **options: Any) -> str:
            async with session.request(method, path, **options) as response:
                text = await response.text()
                assert response.status < 300, text
                return text

        async def ended(text: str) -> Operation:
            operation = Operation.model_validate_json(text)
            while operation.state is OperationState.RUNNING:
                path = f"/v1/operations/{operation.request_id}?wait_s=20"
                operation = Operation.model_validate_json(await ask("GET", path))
            return operation

        async def status() -> VMStatus:
            return VMStatus.model_validate_json(await ask("GET", f"/v1/vms/{NAME}"))

        # Not granted yet: the manager hears of the VM by the next report.
        before = BudgetStatus.model_validate_json(await ask("GET", "/v1/budget"))
        body = {"request_id": secrets.token_hex(8), "epoch": EPOCH, "vm": VM, "start_size": INITIAL}
        operation = await ended(await ask("POST", "/v1/vms", json=body))
        assert operation.state is OperationState.DONE, operation.sentence
        try:
            assert f"{NAME} runs with 1 cores, 512 MiB" in operation.sentence
            xml = await asyncio.to_thread(virsh, "dumpxml", domain) or ""
            # All vCPUs are there from the start, and the definition asks for no more memory than it starts with, and
            # has a quota, as soon as it runs: any start past us comes up with that.
            stored = await asyncio.to_thread(virsh, "dumpxml", domain, "--inactive") or ""
            assert re.findall(r"<quota>(\d+)<", stored) == ["50000"]
            assert re.search(r"<vcpu[^>]*>2</vcpu>", xml)
            shape = [int(re.findall(rf"<{name} unit='KiB'>(\d+)<", xml)[0]) // 1024 for name in ("requested", "size")]
            assert shape[0] <= 512 - 384 < 768 - 512 <= shape[1]

            async def whole() -> bool:
                now = await status()
                # What is to be given is on the books at once; it is there when the resize has ended.
                grown = (now.current.cpu_cores, round(now.current.memory_mib / 8)) == (2.0, 96)
                return grown and now.state is VMState.RUNNING

            try:
                await until(whole)
            except TimeoutError:
                pytest.fail(await ask("GET", "/v1/decisions") + (await status()).model_dump_json())
            budget = BudgetStatus.model_validate_json(await ask("GET", "/v1/budget"))
            assert budget.number > before.number
            assert budget.held.cpu_cores == 1.5
            assert await asyncio.to_thread(quota_us, domain) == -1
        finally:
            params = {"request_id": secrets.token_hex(8), "reason": "delete", "epoch": EPOCH}
            text = await ask("DELETE", f"/v1/vms/{NAME}", params=params)
            assert (await ended(text)).state is OperationState.DONE

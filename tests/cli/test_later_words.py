"""The client and the commands against a manager of a later version, whose answers have words that they do not know."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from ebbtide.cli.main import app
from ebbtide.client import ManagerClient
from ebbtide.lab.state import write_private
from ebbtide.messages.operations import OperationState

SIZE = {"cpu_cores": 1.0, "memory_mib": 512.0}
VM = {
    "name": "web", "host": "host-a", "state": "hibernating", "priority": "spot", "nominal": SIZE, "minimum": SIZE,
    "ceiling": SIZE, "current": SIZE, "generation": 1, "guest_kind": "firmware", "sentence": "it sleeps",
    "on_preemption": "freeze", "at_next_start": {"name": "web", "priority": "spot", "nominal": SIZE, "ceiling": SIZE},
}  # fmt: skip
HOST = {
    "id": "host-a", "url": "http://127.0.0.1:1", "state": "resting", "seen_at": 1.0, "capacity": SIZE, "free": SIZE,
    "deflatable": SIZE, "accelerator": "kvm", "mode": "evacuating", "vms": ["web"],
}  # fmt: skip
LEDGER = {"resource": "cpu_cores", "asked": 1, "promised": 1, "verified": 1, "seconds": 1, "reason": ""}
OPERATION = {
    "request_id": "r", "kind": "polish", "state": "cancelled", "sentence": "somebody cancelled it", "started_at": 1.0,
    "reason": {"code": "bored"},
    "vms": [{"name": "web", "generation": 1, "before": SIZE, "after": SIZE, "target": SIZE, "shortfall": {},
             "ledger": [{**LEDGER, "layer": "firmware"}], "seconds": 1, "sentence": ""}],
}  # fmt: skip
TASK = {
    "name": "sum", "state": "frozen", "cores": 1, "duration_s": None, "restartable": False, "max_attempts": 1,
    "command": ["true"], "attempts": 1, "preemptions": 0, "submitted_at": 1.0, "sentence": "it waits",
    "checkpoint_signal": "HUP",
}  # fmt: skip
STATUS = {
    "name": "web", "host": "host-a", "domain": "ebb-web", "state": "hibernating", "priority": "spot", "nominal": SIZE,
    "minimum": SIZE, "current": SIZE, "overhead_mib": 0, "generation": 1, "guest_connected": True,
    "guest_kind": "firmware", "boot_memory_mib": 384,
}  # fmt: skip
FINDING = {"mechanism": "memory-lane", "layer": "firmware", "available": True, "reason": ""}
EXPLANATION = {
    "host": "host-a", "state": "hibernating", "sentence": "it sleeps", "on_preemption": "freeze",
    "explanation": {"vm": STATUS, "sentence": "it sleeps", "bound": SIZE, "deflatable": {}, "mode": "evacuating",
                    "findings": [FINDING]},
}  # fmt: skip
ANSWERS: dict[str, Any] = {
    "/v1/vms": {"vms": [VM], "next": None},
    "/v1/vms/web": VM,
    "/v1/vms/web/explain": EXPLANATION,
    "/v1/hosts": {"hosts": [HOST], "next": None},
    "/v1/hosts/host-a": HOST,
    "/v1/operations": {"operations": [OPERATION], "next": None},
    "/v1/operations/r": OPERATION,
    "/v1/tasks": {"tasks": [TASK], "next": None},
    "/v1/tasks/sum": TASK,
}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(ANSWERS[request.path])

    manager = web.Application()
    manager.router.add_get("/{path:.*}", answer)
    async with TestServer(manager) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_the_client_shows_words_that_it_does_not_know_as_they_were_sent(url: str) -> None:
    async with ManagerClient(url, "token") as client:
        vm, (host,) = await client.vm("web"), await client.hosts()
        assert (vm.state, vm.priority.value, vm.guest_kind.value) == ("hibernating", "spot", "firmware")
        assert vm.at_next_start is not None
        assert vm.at_next_start.priority.value == "spot"
        assert (host.state, host.mode.value) == ("resting", "evacuating")


async def test_an_operation_in_a_state_that_is_not_known_has_ended_and_is_not_done(url: str) -> None:
    """As the documents promise: all states but `running` are final."""
    async with ManagerClient(url, "token") as client:
        found = await client.wait(await client.operation("r"), limit_s=5.0)
    assert (found.kind, found.state.value, found.state is OperationState.DONE) == ("polish", "cancelled", False)
    assert found.reason is not None
    assert (found.reason.code.value, found.vms[0].ledger[0].layer.value) == ("bored", "firmware")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("vm list", "hibernating"),
        ("vm show web", "hibernating"),
        ("vm explain web", "memory-lane"),
        ("host list", "evacuating"),
        ("host show host-a", "evacuating"),
        ("plan list", "cancelled"),
        ("plan show r", "firmware"),
        ("task list", "frozen"),
        ("task show sum", "frozen"),
    ],
)
@pytest.mark.parametrize("output", ["table", "json", "yaml"])
async def test_commands_show_them_too(url: str, tmp_path: Path, words: str, shown: str, output: str) -> None:
    write_private(tmp_path / "token", "token\n")
    argv = [*words.split(), "-o", output, "--manager", url, "--token-file", str(tmp_path / "token")]
    result = await asyncio.to_thread(CliRunner().invoke, app, argv)
    assert (result.exit_code, result.stderr) == (0, ""), (result.output, result.exception)
    assert shown in result.stdout
    if output == "json":
        json.loads(result.stdout)

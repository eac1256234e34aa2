"""The client and the commands against a real manager, a process of its own, without any host."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ebbtide.client import ManagerClient, ManagerRefused, ManagerUnreachable
from ebbtide.client.manager import events_in
from ebbtide.deflation.allocations import Priority
from ebbtide.lab import processes
from ebbtide.lab.cluster import free_ports, program
from ebbtide.lab.state import Process, write_private
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec

SPEC = VMSpec(name="web", priority=Priority.DEFLATABLE, nominal=Vector(cpu_cores=1, memory_mib=512))


@dataclass(frozen=True)
class Manager:
    url: str
    token_file: Path


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    home = tmp_path_factory.mktemp("manager")
    for name in ("users", "agents"):
        write_private(home / name, f"{name}-secret\n")
    (port,) = free_ports(1)
    argv = [program("ebb-manager"), "--listen", f"127.0.0.1:{port}", "--token-file", str(home / "users")]
    argv += ["--hosts-key-file", str(home / "agents"), "--database", str(home / "manager.sqlite")]
    process = processes.start("manager", argv, home / "log")
    found = Manager(f"http://127.0.0.1:{port}", home / "users")
    try:
        asyncio.run(answers(found, process, home / "log"))
        yield found
    finally:
        assert processes.stop([process]) == [], "the manager did not end by SIGTERM"


async def answers(manager: Manager, process: Process, log: Path) -> None:
    async with asyncio.timeout(30), client_of(manager) as client:
        while True:
            assert processes.running(process), processes.tail(log, 20)
            try:
                await client.hosts()
                return
            except ManagerUnreachable:
                await asyncio.sleep(0.05)


def client_of(manager: Manager, token: str | None = None) -> ManagerClient:
    return ManagerClient(manager.url, token or manager.token_file.read_text().strip())


async def test_an_empty_manager_answers_every_question(manager: Manager) -> None:
    async with client_of(manager) as client:
        assert await client.hosts() == []
        assert await client.vms() == []
        assert await client.machines(60) == []
        assert await client.core_changes() == []


async def test_a_wrong_token_is_refused_with_401(manager: Manager) -> None:
    async with client_of(manager, "wrong") as client:
        with pytest.raises(ManagerRefused) as caught:
            await client.hosts()
    assert caught.value.status == 401


async def test_an_unknown_vm_is_refused_with_404(manager: Manager) -> None:
    async with client_of(manager) as client:
        for question in (client.vm("none"), client.delete("none")):
            with pytest.raises(ManagerRefused) as caught:
                await question
            assert caught.value.status == 404


async def test_a_placement_is_followed_to_its_end_and_a_repetition_answers_the_same(manager: Manager) -> None:
    told: list[str] = []
    async with client_of(manager) as client:
        first = await client.create(SPEC, request_id="once")
        ended = await client.wait(first, limit_s=30, progress=told.append)
        assert ended.state is OperationState.FAILED
        # The outcome is not told as a step as well.
        assert told == [sentence for sentence in ended.progress if sentence != ended.sentence]
        assert ended.sentence
        assert await client.create(SPEC, request_id="once") == ended
        assert "once" in [operation.request_id for operation in await client.operations()]
        assert (await client.events())[0].sentence


async def test_rows_and_events_of_a_later_manager_may_say_more(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"id": 7, "at": 1.0, "kind": "deleted", "vm": "web", "host": None, "sentence": "gone", "new": 1}

    async def page(*words: object, **options: object) -> dict[str, object]:
        return {"events": [row], "next": None, "position": 7, "new": 1}

    client = ManagerClient("http://127.0.0.1:1", "secret")
    monkeypatch.setattr(client, "_request", page)

    async def stream() -> AsyncIterator[bytes]:
        yield f"data: {json.dumps(row)}\n\n".encode()

    found = [*await client.events(), *[event async for event in events_in(stream())]]
    assert [(event.id, event.vm) for event in found] == [(7, "web")] * 2


def test_a_command_prints_json_that_is_the_body_on_the_wire(manager: Manager) -> None:
    words = [sys.executable, "-m", "ebbtide.cli.main", "host", "list", "-o", "json", "--manager", manager.url]
    words += ["--token-file", str(manager.token_file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    assert (done.returncode, done.stderr, json.loads(done.stdout)) == (0, "", {"hosts": []})


def test_an_unknown_vm_ends_a_command_with_3_and_one_sentence(manager: Manager) -> None:
    words = [
        sys.executable,
        "-m",
        "ebbtide.cli.main",
        "vm",
        "target",
        "none",
        "--cpu-cores",
        "1",
        "--manager",
        manager.url,
    ]
    words += ["--token-file", str(manager.token_file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "error: " in done.stderr
    assert "none" in done.stderr
    assert "Traceback" not in done.stderr

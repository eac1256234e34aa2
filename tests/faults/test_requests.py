"""Requests that come twice, at once or without time; clocks, disks and managers that fail.

See docs/reference/faults.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from hostagent.control import reporter
from hostagent.state.journal import Journal
from tests.faults.fakes import agent_process
from tests.faults.invariants import broken, not_nominal
from tests.faults.ward import LOW, Ward
from tests.hostagent.conftest import low_vm
from tests.hostagent.world import World

real = [pytest.mark.guest, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]


def guest_test(function: Any) -> Any:
    for mark in real:
        function = mark(function)
    return function


@guest_test
async def test_a_deadline_of_zero_takes_only_what_needs_no_waiting(ward: Ward) -> None:
    operation = await ward.target(1.5, 480, deadline_s=0.0)
    assert operation.state.value == "partial"
    assert operation.vms[0].after.memory_mib == 768
    assert operation.vms[0].after.cpu_cores == pytest.approx(1.5, abs=0.011)
    await ward.hold()


@guest_test
async def test_the_same_request_twice_is_carried_out_once(ward: Ward) -> None:
    body = ward.target_body(2.0, 600)
    path = f"/v1/vms/{LOW}/target"
    answers = await asyncio.gather(*(ward.send("PUT", path, body) for _ in range(2)))
    assert [status for status, _ in answers] == [202, 202]
    operation = await ward.ended(body["request_id"])
    assert operation.state.value == "done", operation.sentence
    after = await ward.hold()
    status, again = await ward.send("PUT", path, body)
    assert (status, again["state"], again["sentence"]) == (202, "done", operation.sentence)
    assert await ward.picture() == after or (await ward.hold()).vms[LOW].held == after.vms[LOW].held
    changes = [change for change in ward.host.journal.changes if change.cause == body["request_id"]]
    assert len(changes) == 1
    status, problem = await ward.send("PUT", path, body | {"deadline_s": 7.0})
    assert (status, problem["field"]) == (409, "request_id")


@guest_test
async def test_of_two_requests_for_one_vm_at_once_the_later_generation_stands(ward: Ward) -> None:
    first = ward.target_body(2.0, 600)
    second = ward.target_body(1.0, 500) | {"generation": first["generation"] + 1}
    path = f"/v1/vms/{LOW}/target"
    answers = await asyncio.gather(ward.send("PUT", path, first), ward.send("PUT", path, second))
    assert answers[1][0] == 202, answers
    taken = [body for body, (status, _) in zip((first, second), answers, strict=True) if status == 202]
    operations = [await ward.ended(body["request_id"]) for body in taken]
    assert operations[-1].state.value == "done", operations
    after = await ward.hold()
    assert after.vms[LOW].status.generation == second["generation"]
    assert after.vms[LOW].held.memory_mib == pytest.approx(500, abs=2)
    assert after.vms[LOW].held.cpu_cores == pytest.approx(1.0, abs=0.011)


@guest_test
async def test_clocks_that_jump_change_no_deadline_and_no_size(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    real_time, offset_s = time.time, 86_400.0
    monkeypatch.setattr(time, "time", lambda: real_time() + offset_s)
    request_id = await ward.begin_target(2.0, 560)
    await ward.until_falling()
    offset_s = -1e9
    await ward.hand().shell("busybox date -s @86400")
    operation = await ward.ended(request_id)
    assert operation.state.value == "done", operation.sentence
    assert operation.seconds >= 0
    await ward.hold()
    assert (await ward.reinflate()).state.value == "done"


@guest_test
async def test_without_its_manager_a_host_goes_on_and_loses_no_core_change(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "EVERY_S", 0.5)
    got: list[dict[str, Any]] = []

    async def take(request: web.Request) -> web.Response:
        got.append(await request.json())
        sequence = max((change["sequence"] for change in got[-1]["core_changes"]), default=0)
        return web.json_response({"epoch": 0, "acknowledged": sequence})

    manager = web.Application()
    manager.router.add_post(f"/v1/hosts/{ward.host_id}/report", take)
    server = TestServer(manager)
    await server.start_server()
    port = server.port
    await server.close()
    assert port is not None
    reporting = asyncio.create_task(reporter.Reporter(ward.host, f"http://127.0.0.1:{port}", "t").run())
    try:
        operation = await ward.target(1.5, 600)
        assert operation.state.value == "done", operation.sentence
        waiting = [change.cause for change in ward.host.journal.changes]
        assert operation.request_id in waiting
        await ward.hold()
        manager = web.Application()
        manager.router.add_post(f"/v1/hosts/{ward.host_id}/report", take)
        server = TestServer(manager, port=port)
        await server.start_server()
        await ward.until("all changes have been told", lambda: not ward.host.journal.changes)
        told = [change["cause"] for report in got for change in report["core_changes"]]
        assert set(waiting) <= set(told)
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        await server.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for next to nothing."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@guest_test
async def test_a_full_disk_under_the_journal_lets_nothing_be_forgotten(
    ward: Ward, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of cores that cannot be written is not committed: the VM stays charged in full, and has it all again."""
    journal = Journal(small_disk)
    monkeypatch.setattr(ward.host, "journal", journal)
    filler = small_disk / "filler"
    _fill(filler)
    operation = await ward.target(1.5, 600)
    assert operation.state.value == "partial", operation.sentence
    assert "could not be written" in operation.sentence
    assert ward.host.vm(LOW).status().current.cpu_cores == 3.0
    assert journal.changes == []
    filler.unlink()
    await ward.until("it has its cores again", lambda: _has_cores(ward, 3.0))
    await ward.hold()
    assert journal.changes == []
    assert (await ward.target(1.5, 600)).state.value == "done"
    assert [(change.cores_before, change.cores_after) for change in journal.changes] == [(3.0, 1.5)]


async def _has_cores(ward: Ward, cores: float) -> bool:
    return (await ward.seen(LOW)).held.cpu_cores == pytest.approx(cores, abs=0.011)


def _fill(path: Path) -> None:
    """Write until there is no room left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


@pytest.mark.service
async def test_an_agent_whose_log_is_on_a_full_disk_works_on(world: World, tmp_path: Path) -> None:
    async with agent_process(world, tmp_path) as agent:
        await agent.start(log=Path("/dev/full"))
        created = await agent.command("POST", "/v1/vms", {"request_id": "c", "vm": low_vm("low-1")})
        assert created["state"] == "done", created
        await agent.connected()
        before = await agent.picture()
        body = {"request_id": "k", "need": {"cpu_cores": 1.0, "memory_mib": 400.0}, "deadline_s": 30.0}
        operation = await agent.command("POST", "/v1/reclaims", body)
        assert operation["state"] == "done", operation
        assert broken(before, await agent.picture()) == []
        assert (await agent.command("POST", "/v1/reinflations", {"request_id": "back"}))["state"] == "done"
        assert not_nominal(await agent.picture()) == []

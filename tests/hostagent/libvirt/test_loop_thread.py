"""The event loop's own thread never waits for libvirt, a file or a process (rule 10)."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer, unused_port

from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab.state import write_private
from ebbtide.messages.operations import Operation
from hostagent.control import reconciler
from hostagent.libvirt import disks, settling
from hostagent.libvirt.definitions import usable_boot_mib
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.operations.agent import Agent
from hostagent.service import serve
from hostagent.state.journal import Journal
from hostagent.vm.host import Host, Slice
from tests.hostagent.conftest import TOKEN, low_vm
from tests.hostagent.libvirt_stand_in import StandIn
from tests.hostagent.local_guest import Conversation, Guest
from tests.hostagent.loop_thread import watched_thread
from tests.waiting import until

T = TypeVar("T")
CAPACITY = ResourceVector(cpu_cores=6, memory_mib=4000, disk_mib_s=100)
VM = "ebb-host-a.low-1"


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "SURVEY_S", 0.05)
    monkeypatch.setattr(reconciler, "CHECK_S", 0.1)
    monkeypatch.setattr(reconciler, "OWNERS_S", 0.1)
    monkeypatch.setattr(settling, "LOOK_S", 0.01)

    def overlay(base: Path, directory: Path) -> Path:
        directory.mkdir(parents=True)
        (directory / "disk.qcow2").touch()
        return directory / "disk.qcow2"

    # qemu-img is not there wherever this runs.
    monkeypatch.setattr(disks, "create_overlay", overlay)


@pytest.fixture
async def libvirt() -> AsyncIterator[StandIn]:
    with tempfile.TemporaryDirectory(prefix="ebb") as directory:
        channels = Path(directory)
        made = StandIn(channels)
        server = await asyncio.start_unix_server(lambda reader, writer: _guest(made, reader, writer), channels / VM)
        yield made
        server.close()


async def _guest(libvirt: StandIn, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The guest of the only VM, behind a real socket."""
    guest = Guest(set(range(3)), cache_mib=200.0)
    end = cast(asyncio.StreamReader, SimpleNamespace(feed_data=writer.write, feed_eof=writer.close))
    domain = libvirt._domains[VM]
    priority: Any = "deflatable"
    conversation = Conversation(guest, 3, lambda: priority, lambda: domain._held_mib, print, lambda: 0.0, end)
    with contextlib.suppress(asyncio.CancelledError):
        while line := await reader.readline():
            conversation.write(line)
    conversation.close()
    writer.close()


@contextlib.asynccontextmanager
async def running_agent(libvirt: StandIn, directory: Path) -> AsyncIterator[Callable[..., Awaitable[Operation]]]:
    """The whole agent with API and reports; gives a function that sends a command and waits until it has ended."""
    token_file = directory / "token"
    report_token_file = directory / "report-token"
    write_private(token_file, TOKEN)
    write_private(report_token_file, "another-token")
    manager = web.Application()
    reports = 0

    async def report(request: web.Request) -> web.Response:
        nonlocal reports
        reports += 1
        return web.json_response({"epoch": 0, "acknowledged": reports})

    manager.router.add_post("/v1/hosts/host-a/report", report)
    settings = LibvirtSettings("host-a", "stand-in", "qemu", directory, directory / "disks")
    port = unused_port()
    part = Slice("host-a", f"http://127.0.0.1:{port}", CAPACITY, "qemu", 100.0, 0.0)
    journal = await asyncio.to_thread(Journal, directory)
    async with TestServer(manager) as listening, ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        agent = Agent(Host(part, LibvirtHypervisor(settings, lambda uri: libvirt), journal), usable_boot_mib)
        stop = asyncio.Event()
        url = str(listening.make_url(""))
        serving = asyncio.create_task(serve(agent, "127.0.0.1", port, token_file, url, report_token_file, stop))
        await until(lambda: reports > 0)

        async def command(method: str, path: str, body: dict[str, Any]) -> Operation:
            async with session.request(method, f"{part.url}{path}", json=body) as response:
                text = await response.text()
                assert response.status == 202, text
            request_id = Operation.model_validate_json(text).request_id
            async with session.get(f"{part.url}/v1/operations/{request_id}?wait_s=20") as response:
                return Operation.model_validate_json(await response.text())

        try:
            yield command
        finally:
            stop.set()
            await serving


async def live(libvirt: StandIn, directory: Path) -> None:
    """All that an agent does: start, create, look, deflate, reinflate, delete, report, end."""
    async with running_agent(libvirt, directory) as command:
        vm = low_vm("low-1", nominal={"cpu_cores": 3.0, "memory_mib": 1024.0, "disk_mib_s": 50.0})
        assert (await command("POST", "/v1/vms", {"request_id": "c", "vm": vm})).state == "done"
        looks = names(libvirt).count("getAllDomainStats")
        await until(lambda: names(libvirt).count("getAllDomainStats") > looks + 4)
        need = {"cpu_cores": 1.5, "memory_mib": 560.0, "disk_mib_s": 20.0}
        operation = await command("POST", "/v1/reclaims", {"request_id": "r", "need": need})
        assert operation.state == "done", operation.sentence
        operation = await command("POST", "/v1/reinflations", {"request_id": "b"})
        assert operation.state == "done", operation.sentence
        assert (await command("DELETE", "/v1/vms/low-1?request_id=d", {})).state == "done"


def names(libvirt: StandIn) -> list[str]:
    return [name for name, _ in libvirt._calls]


async def test_no_libvirt_or_file_call_runs_on_the_thread_of_the_event_loop(libvirt: StandIn, tmp_path: Path) -> None:
    with watched_thread() as offences:
        await live(libvirt, tmp_path)
    assert offences == []
    assert {name for name, thread in libvirt._calls if thread == threading.get_ident()} == set()
    # All that matters was called at all.
    assert set(names(libvirt)) >= {
        *("setMemoryFlags", "updateDeviceFlags", "setSchedulerParametersFlags", "setBlockIoTune", "setMetadata"),
        *("getAllDomainStats", "memoryStats", "defineXML", "resume", "undefineFlags"),
    }


async def test_files_and_libvirt_on_the_thread_of_the_event_loop_are_seen(
    libvirt: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same without threads: the test above can fail."""

    async def at_once(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        return function(*arguments, **named)

    def in_executor(self: Any, executor: Any, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(function(*arguments))
        return future

    with watched_thread() as offences, monkeypatch.context() as patch:
        patch.setattr(asyncio, "to_thread", at_once)
        patch.setattr(asyncio.base_events.BaseEventLoop, "run_in_executor", in_executor)
        await live(libvirt, tmp_path)
    assert [one for one in offences if "meminfo" in one], "memory of the host"
    assert [one for one in offences if "core-changes" in one], "journal"
    assert {"listAllDomains", "getAllDomainStats", "setMemoryFlags"} <= {
        name for name, thread in libvirt._calls if thread == threading.get_ident()
    }

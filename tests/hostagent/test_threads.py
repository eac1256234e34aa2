"""Work that may take long has threads of its own, and what must not wait gets one although asyncio's are all taken."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.limits import tc
from hostagent.vm.host import Host
from tests.hostagent.libvirt.test_disks import INTENT, VM
from tests.hostagent.libvirt_stand_in import StandIn


@pytest_asyncio.fixture
async def none_left() -> AsyncIterator[ThreadPoolExecutor]:
    """Asyncio's only thread, which is taken; to be made the loop's by the test. It is let go before the loop closes."""
    go_on = threading.Event()
    pool = ThreadPoolExecutor(1)
    pool.submit(go_on.wait, 60.0)
    yield pool
    go_on.set()


async def test_what_memory_the_host_has_is_read_although_no_thread_is_left(
    host: Host, none_left: ThreadPoolExecutor
) -> None:
    asyncio.get_running_loop().set_default_executor(none_left)
    async with asyncio.timeout(20.0):
        await host.sample()


async def test_qemu_img_tc_and_the_removal_of_disks_take_no_thread_of_asyncios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, none_left: ThreadPoolExecutor
) -> None:
    (tmp_path / "base.qcow2").touch()
    monkeypatch.setattr(subprocess, "run", lambda argv, **_: _answered(argv))
    settings = LibvirtSettings("host-a", "stand-in", "qemu", tmp_path, tmp_path / "disks")
    hypervisor = LibvirtHypervisor(settings, lambda uri: StandIn(tmp_path))
    await hypervisor.sweep()  # reads the templates once
    asyncio.get_running_loop().set_default_executor(none_left)
    async with asyncio.timeout(20.0):
        await hypervisor.create(VM, INTENT)
        await hypervisor.destroy(VM)
        assert await tc.run(["tc"]) == "[]"


def _answered(argv: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.CompletedProcess(argv, 0, b"[]", b"")

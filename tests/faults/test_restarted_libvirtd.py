"""libvirtd is restarted; real guests, which live through it (docs/reference/faults.md)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
from pathlib import Path

import psutil
import pytest

from ebbtide.lab import processes
from ebbtide.lab.services import LIBVIRTD, SYSTEMD
from ebbtide.lab.state import LabState
from tests.faults.ward import LOW, Ward
from tests.waiting import until_sync

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]


async def test_a_libvirtd_that_is_restarted_in_the_middle_is_an_ordinary_event(
    ward: Ward, libvirt_services: LabState, tmp_path: Path
) -> None:
    request_id = await ward.begin_target(1.5, 480)
    await ward.until_falling()
    await asyncio.to_thread(restart_libvirtd, libvirt_services, tmp_path / "libvirtd.log")
    operation = await ward.ended(request_id)
    assert operation.state.value in ("done", "partial"), operation.sentence
    await ward.settled()
    await ward.connected()
    await ward.hold()
    again = await ward.target(1.0, 440)
    assert again.state.value == "done", again.sentence
    await ward.hold()
    assert ward.host.vm(LOW).status().current.cpu_cores == pytest.approx(1.0, abs=0.011)


def restart_libvirtd(state: LabState, log: Path) -> None:
    """As it was started: one of the lab's own stands in ``state.services`` under its new pid afterwards."""
    if SYSTEMD.is_dir():
        subprocess.run(["systemctl", "restart", LIBVIRTD.name], check=True)
    else:
        pid = listener(LIBVIRTD.sockets)
        argv = psutil.Process(pid).cmdline()
        processes.stop([processes.recorded(LIBVIRTD.name, pid)])
        started = processes.start(LIBVIRTD.name, argv, log)
        state.services = [started if process.pid == pid else process for process in state.services]
    until_sync(LIBVIRTD.answers, "libvirtd answers again")


def listener(sockets: tuple[Path, ...]) -> int:
    """The process that listens on one of them."""
    for path in sockets:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(path))
            pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return int(pid)
    pytest.fail("libvirtd does not run")

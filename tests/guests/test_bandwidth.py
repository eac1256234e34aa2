"""Disk and network bandwidth of one real guest: taken and given through the agent's API, measured as throughput.

The guest's tap is moved to a network namespace of the test once QEMU holds it, so that no traffic leaves it.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libvirt
import pytest

from ebbtide.deflation.ledger import Layer
from ebbtide.lab import paths
from ebbtide.lab.guest_link import LabLink, channel_path
from ebbtide.lab.image import build_image
from ebbtide.lab.services import ensure_services, open_libvirt, stop_services
from ebbtide.lab.state import LabState, write_private
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.vms import VMStatus
from hostagent.domain_xml.templates import tap_name
from hostagent.libvirt.hypervisor import domain_name
from hostagent.libvirt.libvirt_readings import reading_of
from hostagent.limits.bandwidth import GROUP, IOPS_PER_MIB_S, disk_limit, limit_disks
from hostagent.limits.tc import Shape, Tap, TrafficControl

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

#: MiB/s. The network's is so low because an emulated guest on a busy machine moves but a few.
NOMINAL, DISK_LIMIT, NETWORK_LIMIT = 48.0, 4.0, 1.0
SIZE = {"cpu_cores": 2.0, "memory_mib": 512.0}
VM = "net"
HOST_ADDRESS, GUEST_ADDRESS, PORT = "10.77.0.1", "10.77.0.2", 5001
#: Sends to an address until the other end has had enough.
SEND = """
import socket, sys, time
address, seconds = sys.argv[1], float(sys.argv[2])
deadline = time.monotonic() + 20
while True:
    try:
        s = socket.create_connection((address, %d), timeout=20)
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.1)
until = time.monotonic() + seconds + 40
try:
    while time.monotonic() < until:
        s.sendall(bytes(65536))
except OSError:
    pass
"""
#: Receives one connection for some seconds; prints MiB/s, the first half second (what may pass at once) left out.
#: The small buffer is for a receiver that stands still: what has gathered meanwhile must not count as speed.
RECEIVE = """
import socket, sys, time
address, seconds = sys.argv[1], float(sys.argv[2])
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 131072)
server.bind((address, %d))
server.listen()
server.settimeout(30)
s, _ = server.accept()
s.settimeout(20)
counted, began = 0, None
first = time.monotonic()
while began is None or time.monotonic() < began + seconds:
    got = len(s.recv(262144))
    assert got, "the sender has ended"
    if began is not None:
        counted += got
    elif time.monotonic() > first + 0.5:
        began = time.monotonic()
print(counted / (time.monotonic() - began) / 2 ** 20)
"""
SECONDS = 3.0
#: An emulated guest on a busy machine takes its time to boot.
READY_S = 240.0


@dataclass(frozen=True)
class Guest:
    """The VM of this module, its agent and its tap."""

    url: str
    token: str
    domain: Any
    tap: Tap
    #: What stood on the tap when the VM had been started, before it was moved.
    at_start: Shape

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        return ask(self.url, self.token, method, path, body)

    def operate(self, method: str, path: str, body: dict[str, Any] | None = None) -> Operation:
        """Run a command to its end, which must be a good one."""
        begun = Operation.model_validate_json(self.ask(method, path, body))
        deadline_s = time.monotonic() + 120
        while True:
            operation = Operation.model_validate_json(self.ask("GET", f"/v1/operations/{begun.request_id}?wait_s=20"))
            if operation.state is not OperationState.RUNNING:
                break
            assert time.monotonic() < deadline_s, operation
        assert operation.state is OperationState.DONE, operation.sentence
        return operation

    def target(self, disk_mib_s: float, network_mib_s: float) -> Operation:
        generation = VMStatus.model_validate_json(self.ask("GET", f"/v1/vms/{VM}")).generation + 1
        target = SIZE | {"disk_mib_s": disk_mib_s, "network_mib_s": network_mib_s}
        command = {"request_id": secrets.token_hex(8), "generation": generation, "target": target}
        return self.operate("PUT", f"/v1/vms/{VM}/target", command)

    def reinflate(self) -> Operation:
        return self.operate("POST", "/v1/reinflations", {"request_id": secrets.token_hex(8), "vms": [VM]})

    def free(self) -> Vector:
        return HostReport.model_validate_json(self.ask("GET", "/v1/host")).free

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[LabLink]:
        async with await LabLink.connect(channel_path(self.domain.XMLDesc()), READY_S) as link:
            yield link


def ask(url: str, token: str, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url + path, data, {"Authorization": f"Bearer {token}"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def command(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout


def look(tap: Tap) -> Shape:
    return asyncio.run(TrafficControl().look(tap))


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A directory that QEMU's user may pass through."""
    directory = Path(tempfile.mkdtemp(prefix="ebbtide-test-", dir="/var/tmp"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def connection(home: Path) -> Iterator[Any]:
    state = LabState()
    ensure_services(state, home, lambda: None, lambda sentence: None)
    opened = open_libvirt(state.uri)
    yield opened
    opened.close()
    stop_services(state, lambda sentence: None)


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    name = f"ebbtide-test-{secrets.token_hex(4)}"
    command("ip", "netns", "add", name)
    yield name
    command("ip", "netns", "del", name)


@pytest.fixture(scope="module")
def agent(home: Path) -> Iterator[tuple[str, str, str]]:
    """An agent without a manager: host id, URL, token."""
    image = build_image(paths.image_cache())
    host, token = f"bandwidth-{secrets.token_hex(3)}", secrets.token_hex(16)
    write_private(home / "token", token)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = ["--id", host, "--listen", f"127.0.0.1:{port}", "--token-file", str(home / "token")]
    argv += ["--capacity", "cpu_cores=2,memory_mib=1024,disk_mib_s=48,network_mib_s=48", "--accelerator", "qemu"]
    argv += ["--state-dir", str(home / "state"), "--disk-dir", str(home / "disks")]
    argv += ["--image-dir", str(image.base.parent)]
    (home / "disks").mkdir(mode=0o711)
    url = f"http://127.0.0.1:{port}"
    with (home / "agent.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "hostagent.main", *argv], stderr=log, stdout=log)
    try:
        deadline_s = time.monotonic() + 60
        while True:
            with suppress(urllib.error.URLError):
                ask(url, token, "GET", "/healthz")
                break
            assert time.monotonic() < deadline_s, (home / "agent.log").read_text()
            time.sleep(0.1)
        yield host, url, token
    finally:
        process.terminate()
        process.wait(30)
        print((home / "agent.log").read_text())


@pytest.fixture(scope="module")
def guest(agent: tuple[str, str, str], connection: Any, namespace: str) -> Iterator[Guest]:
    host, url, token = agent
    name = domain_name(host, VM)
    tap = Tap(tap_name(name), namespace)
    command("ip", "tuntap", "add", "dev", tap.name, "mode", "tap", "vnet_hdr")
    try:
        spec = {
            "name": VM,
            "template": "lab-net",
            "nominal": SIZE | {"disk_mib_s": NOMINAL, "network_mib_s": NOMINAL},
            "minimum": {"disk_mib_s": 2.0},
        }
        made = Guest(url, token, None, tap, Shape())
        made.operate("POST", "/v1/vms", {"request_id": secrets.token_hex(8), "vm": spec})
        at_start = look(Tap(tap.name))
        command("ip", "link", "set", tap.name, "netns", namespace)
        command("ip", "-n", namespace, "address", "add", f"{HOST_ADDRESS}/24", "dev", tap.name)
        command("ip", "-n", namespace, "link", "set", tap.name, "up")
        running = Guest(url, token, connection.lookupByName(name), tap, at_start)
        asyncio.run(_configure(running))
        yield running
    finally:
        with suppress(urllib.error.HTTPError):
            ask(url, token, "DELETE", f"/v1/vms/{VM}?request_id=last")
            ask(url, token, "GET", "/v1/operations/last?wait_s=20")
        _remove(connection, name)
        for argv in (("link", "del", tap.name), ("link", "del", tap.ifb)):
            subprocess.run(["ip", *argv], check=False, capture_output=True)


def _remove(connection: Any, name: str) -> None:
    with suppress(libvirt.libvirtError):
        domain = connection.lookupByName(name)
        if domain.isActive():
            domain.destroy()
        domain.undefine()


async def _configure(guest: Guest) -> None:
    async with guest.inside() as link:
        for argv in (("address", "add", f"{GUEST_ADDRESS}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            done = await link.call("exec", argv=["busybox", "ip", *argv], timeout_s=10)
            assert done["returncode"] == 0, done["stderr"]


async def read_disk(guest: Guest, block: str, count: int) -> tuple[float, float]:
    """Read the guest's disk past its page cache: (MiB/s, operations a second)."""
    async with guest.inside() as link:
        argv = ["dd", "if=/dev/vda", "of=/dev/null", f"bs={block}", f"count={count}", "iflag=direct"]
        done = await link.call("exec", argv=argv, timeout_s=60)
    found = re.search(r"^(\d+) bytes .* copied, ([\d.]+) s", done["stderr"], re.MULTILINE)
    assert found, done["stderr"]
    return int(found[1]) / 2**20 / float(found[2]), count / float(found[2])


async def to_guest(guest: Guest) -> float:
    """Send from the namespace into the guest, MiB/s as the guest receives."""
    async with guest.inside() as link:
        receiving = link.call("exec", argv=["python3", "-c", RECEIVE % PORT, GUEST_ADDRESS, str(SECONDS)], timeout_s=60)
        sending = asyncio.to_thread(in_namespace, guest, SEND, GUEST_ADDRESS)
        done, _ = await asyncio.gather(receiving, sending)
    assert done["returncode"] == 0, done["stderr"]
    return float(done["stdout"])


async def from_guest(guest: Guest) -> float:
    """Send from the guest into the namespace, MiB/s as the host receives."""
    async with guest.inside() as link:
        sending = link.call("exec", argv=["python3", "-c", SEND % PORT, HOST_ADDRESS, str(SECONDS)], timeout_s=60)
        said, _ = await asyncio.gather(asyncio.to_thread(in_namespace, guest, RECEIVE, HOST_ADDRESS), sending)
    return float(said)


def in_namespace(guest: Guest, program: str, address: str) -> str:
    assert guest.tap.namespace is not None
    argv = (sys.executable, "-c", program % PORT, address, str(SECONDS))
    return command("ip", "netns", "exec", guest.tap.namespace, *argv)


def held(rate: float, limit: float) -> bool:
    """Whether a rate is at most a limit, and near enough to it that the limit does not choke."""
    return limit / 4 <= rate <= limit * 1.3


@contextmanager
def paused_domain(connection: Any, devices: str) -> Iterator[Any]:
    """A QEMU of 64 MiB that never runs."""
    name = f"ebbtide-test-{secrets.token_hex(4)}"
    domain = connection.defineXML(
        f"<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory>"
        f"<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>{devices}</devices></domain>"
    )
    try:
        domain.createWithFlags(libvirt.VIR_DOMAIN_START_PAUSED)
        yield domain
    finally:
        _remove(connection, name)


@pytest.fixture
def two_disks(home: Path, connection: Any) -> Iterator[Any]:
    """A QEMU with two disks that never runs."""
    elements = ""
    for disk in ("vda", "vdb"):
        path = home / f"{disk}.qcow2"
        command("qemu-img", "create", "-q", "-f", "qcow2", str(path), "8M")
        elements += f"<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{path}'/>"
        elements += f"<target dev='{disk}' bus='virtio'/></disk>"
    with paused_domain(connection, elements) as domain:
        yield domain


def test_several_disks_share_one_limit_now_and_at_the_next_start(two_disks: Any) -> None:
    def has() -> float | None:
        return disk_limit(two_disks, ElementTree.fromstring(two_disks.XMLDesc()))

    assert has() is None
    # libvirt would read 0 as unlimited.
    for asked, given in ((40.5, 40.5), (0.0, 1.0)):
        assert limit_disks(two_disks, asked) == ""
        assert has() == given
        for disk in ("vda", "vdb"):
            for flag in (libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG):
                tuned = two_disks.blockIoTune(disk, flag)
                assert tuned["total_bytes_sec"] == int(given * 2**20)
                assert tuned["total_iops_sec"] == int(given * IOPS_PER_MIB_S)
                assert tuned["group_name"] == GROUP
    # A foreign hand is seen, and put right.
    two_disks.setBlockIoTune("vdb", {"total_bytes_sec": 5 * 2**20}, libvirt.VIR_DOMAIN_AFFECT_LIVE)
    assert has() == 5
    assert limit_disks(two_disks, 8.0) == ""
    assert has() == 8
    assert limit_disks(two_disks, None) == ""
    assert has() is None
    # A limit that is not ours is not lifted.
    two_disks.setBlockIoTune("vda", {"total_bytes_sec": 2**20, "group_name": "theirs"})
    assert limit_disks(two_disks, None) == ""
    assert two_disks.blockIoTune("vda")["total_bytes_sec"] == 2**20
    assert has() is None, "the other disk is free"


def test_a_domain_without_a_balloon_holds_all_of_its_memory(connection: Any) -> None:
    with paused_domain(connection, "<memballoon model='none'/>") as domain:
        assert "actual" not in domain.memoryStats()
        reading, _ = reading_of(domain)
        assert (reading.balloon_mib, reading.stats_period_s) == (64.0, None)


def test_a_vm_is_held_to_its_nominal_bandwidth_before_its_cpus_run(guest: Guest) -> None:
    assert guest.at_start.rate == NOMINAL * 2**20
    assert guest.domain.blockIoTune("vda", libvirt.VIR_DOMAIN_AFFECT_LIVE)["total_bytes_sec"] == NOMINAL * 2**20


async def test_disk_bandwidth_is_taken_and_given_back(guest: Guest) -> None:
    before, _ = await read_disk(guest, "1M", 128)
    assert 2 * DISK_LIMIT <= before <= 1.3 * NOMINAL

    operation = await asyncio.to_thread(guest.target, DISK_LIMIT, NOMINAL)
    assert guest.free().disk_mib_s == NOMINAL - DISK_LIMIT
    (entry,) = [e for e in operation.vms[0].ledger if e.layer is Layer.HYPERVISOR and e.resource == "disk_mib_s"]
    assert (entry.asked, entry.verified, entry.reason) == (NOMINAL - DISK_LIMIT, NOMINAL - DISK_LIMIT, "")
    limited, _ = await read_disk(guest, "1M", 16)
    _, operations = await read_disk(guest, "4k", 1000)
    assert held(limited, DISK_LIMIT), f"{limited} MiB/s"
    assert held(operations, DISK_LIMIT * IOPS_PER_MIB_S), f"{operations} operations/s"
    # Whoever starts it again: it comes up limited.
    stored = guest.domain.blockIoTune("vda", libvirt.VIR_DOMAIN_AFFECT_CONFIG)
    assert stored["total_bytes_sec"] == DISK_LIMIT * 2**20

    await asyncio.to_thread(guest.reinflate)
    assert guest.free().disk_mib_s == 0
    after, _ = await read_disk(guest, "1M", 128)
    assert 2 * DISK_LIMIT <= after <= 1.3 * NOMINAL
    print(f"disk MiB/s: {before:.1f}, {limited:.1f} under {DISK_LIMIT:g} ({operations:.0f} operations/s), {after:.1f}")


async def test_network_bandwidth_is_taken_and_given_back_each_way(guest: Guest) -> None:
    before = (await to_guest(guest), await from_guest(guest))
    assert min(before) >= 2 * NETWORK_LIMIT

    await asyncio.to_thread(guest.target, NOMINAL, NETWORK_LIMIT)
    assert guest.free().network_mib_s == NOMINAL - NETWORK_LIMIT
    assert (await asyncio.to_thread(look, guest.tap)).rate == NETWORK_LIMIT * 2**20
    limited = (await to_guest(guest), await from_guest(guest))
    assert all(held(rate, NETWORK_LIMIT) for rate in limited), f"{limited} MiB/s"

    await asyncio.to_thread(guest.reinflate)
    assert guest.free().network_mib_s == 0
    after = (await to_guest(guest), await from_guest(guest))
    assert all(2 * NETWORK_LIMIT <= rate <= 1.3 * NOMINAL for rate in after), f"{after} MiB/s"
    for name, rates in (("before", before), ("limited", limited), ("after", after)):
        print(f"network {name}: {rates[0]:.1f} MiB/s to the guest, {rates[1]:.1f} from it")


async def test_a_vm_that_is_removed_leaves_nothing_on_its_tap(guest: Guest) -> None:
    assert (await asyncio.to_thread(look, guest.tap)).ours
    await asyncio.to_thread(guest.operate, "DELETE", f"/v1/vms/{VM}?request_id={secrets.token_hex(8)}")
    assert await asyncio.to_thread(look, guest.tap) == Shape()
    for where in ((), ("-n", str(guest.tap.namespace))):
        assert guest.tap.ifb not in command("ip", *where, "link", "show")

"""A libvirt whose every call takes a while, with guests that do, too: how well VMs are deflated side by side.

It stands in for libvirt-python below the real hypervisor of the agent: what the agent's pool makes wait for one another
really waits. Calls that libvirt-python answers by itself (names) take no time. Sizes move over several looks, as those
of real devices do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libvirt

from ebbtide.messages.guest import PROTOCOL
from hostagent.libvirt.libvirt_hypervisor import GUEST_CHANNEL

VCPUS = 3
BOOT_MIB = 512.0
DEVICE_MIB = 512.0
BLOCK_MIB = 2
#: What the guest needs besides its cache, what the cache holds, and what of it is left when it was asked.
USED_MIB = 80.0
CACHE_MIB = 340.0
KEPT_MIB = 150.0
#: What libvirt says of a balloon besides its size and what would tell of pressure.
BALLOON = ("maximum", "rss", "unused", "available", "disk_caches", "hugetlb_pgalloc", "hugetlb_pgfail")
#: What libvirt reads where there is no memory limit (VIR_DOMAIN_MEMORY_PARAM_UNLIMITED).
NO_LIMIT_KIB = 9_007_199_254_740_991


@dataclass
class Slowness:
    """How slow it is; may be changed at any time.

    call_s: seconds of each call of libvirt or a guest. looks: readings, by libvirt or the guest, that a size
    takes to get to where it is asked to be. polls: how often the application says that it is still at work.
    """

    call_s: float = 0.0
    looks: int = 2
    polls: int = 2


@dataclass
class Moving:
    """A size in MiB that takes several looks to move, by whole blocks as a real device: no rest is less than one."""

    size_mib: float
    goal_mib: float
    looks: int = 0

    def ask(self, goal_mib: float, looks: int) -> None:
        self.goal_mib, self.looks = goal_mib, max(looks, 1)

    def look(self) -> float:
        if self.looks > 0:
            self.looks -= 1
            left_mib = (self.size_mib - self.goal_mib) * self.looks / (self.looks + 1)
            self.size_mib = self.goal_mib + math.trunc(left_mib / BLOCK_MIB) * BLOCK_MIB
        return self.size_mib


@dataclass
class SlowDomain:
    """One domain of the fake and the guest in it. Methods are libvirt's, called from the pool's threads."""

    title: str
    socket: Path
    intent: str
    how: Slowness
    balloon: Moving = field(default_factory=lambda: Moving(BOOT_MIB, BOOT_MIB))
    plugged: Moving = field(default_factory=lambda: Moving(DEVICE_MIB, DEVICE_MIB))
    online: set[int] = field(default_factory=lambda: set(range(VCPUS)))
    cache_mib: float = CACHE_MIB
    polls_left: dict[str, int] = field(default_factory=dict)
    stats_period_s: int = 1
    scheduler: dict[str, int] = field(
        default_factory=lambda: {"cpu_shares": 1024, "vcpu_period": 100_000, "vcpu_quota": -1}
    )
    #: Told when the memory device has moved, as libvirt tells of it.
    tell: Callable[..., None] = lambda *_: None
    calls: Counter[str] = field(default_factory=Counter)
    identity: str = field(default_factory=lambda: str(uuid.uuid4()))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def slow(self, name: str) -> None:
        """A call of libvirt's."""
        with self._lock:
            self.calls[name] += 1
        time.sleep(self.how.call_s)

    # --- answered by the binding itself --------------------------------------------------------------------------

    def name(self) -> str:
        return self.title

    def UUIDString(self) -> str:
        return self.identity

    # --- calls ---------------------------------------------------------------------------------------------------

    def XMLDesc(self, flags: int = 0) -> str:
        self.slow("XMLDesc")
        with self._lock:
            moves, current_mib = self.plugged.looks > 0, self.plugged.look()
        if moves:
            self.tell(None, self, "ua-ebbtide-memory", current_mib, None)
        return f"""<domain type='qemu' id='1'><name>{self.title}</name><uuid>{self.identity}</uuid>
          <memory unit='KiB'>{(BOOT_MIB + DEVICE_MIB) * 1024:.0f}</memory>
          <currentMemory unit='KiB'>{(BOOT_MIB + current_mib) * 1024:.0f}</currentMemory>
          <vcpu placement='static'>{VCPUS}</vcpu>
          <cpu><numa><cell id='0' cpus='0-{VCPUS - 1}' memory='{BOOT_MIB * 1024:.0f}' unit='KiB'/></numa></cpu>
          <devices><disk type='file' device='disk'><source file='/nowhere'/><target dev='vda' bus='virtio'/></disk>
          <channel type='unix'><source mode='bind' path='{self.socket}'/>
            <target type='virtio' name='{GUEST_CHANNEL}' state='connected'/></channel>
          <memballoon model='virtio' autodeflate='off' freePageReporting='on'><stats period='{self.stats_period_s}'/>
            </memballoon>
          <memory model='virtio-mem'><target><size unit='KiB'>{DEVICE_MIB * 1024:.0f}</size><node>0</node>
            <block unit='KiB'>{BLOCK_MIB * 1024}</block>
            <requested unit='KiB'>{self.plugged.goal_mib * 1024:.0f}</requested>
            <current unit='KiB'>{current_mib * 1024:.0f}</current></target><alias name='ua-ebbtide-memory'/></memory>
          </devices></domain>"""

    def metadata(self, kind: int, uri: str, flags: int = 0) -> str:
        self.slow("metadata")
        return self.intent

    def setMetadata(self, kind: int, text: str, key: str, uri: str, flags: int = 0) -> None:
        self.slow("setMetadata")
        self.intent = text

    def isActive(self) -> int:
        self.slow("isActive")
        return 1

    def isPersistent(self) -> int:
        self.slow("isPersistent")
        return 1

    def state(self, flags: int = 0) -> list[int]:
        self.slow("state")
        return [libvirt.VIR_DOMAIN_RUNNING, 1]

    def schedulerParametersFlags(self, flags: int = 0) -> dict[str, int]:
        self.slow("schedulerParametersFlags")
        return dict(self.scheduler)

    def setSchedulerParametersFlags(self, parameters: dict[str, int], flags: int = 0) -> None:
        self.slow("setSchedulerParametersFlags")
        self.scheduler |= parameters

    def memoryStats(self, flags: int = 0) -> dict[str, int]:
        self.slow("memoryStats")
        with self._lock:
            return {"actual": round(self.balloon.look() * 1024)}

    def setMemoryFlags(self, kib: int, flags: int = 0) -> None:
        self.slow("setMemoryFlags")
        with self._lock:
            self.balloon.ask(kib / 1024, self.how.looks)

    def setMemoryStatsPeriod(self, period_s: int, flags: int = 0) -> None:
        self.slow("setMemoryStatsPeriod")
        self.stats_period_s = period_s

    def updateDeviceFlags(self, xml: str, flags: int = 0) -> None:
        self.slow("updateDeviceFlags")
        with self._lock:
            requested = ElementTree.fromstring(xml).findtext("target/requested", "0")
            self.plugged.ask(float(requested) / 1024, self.how.looks)

    def memoryParameters(self, flags: int = 0) -> dict[str, int]:
        self.slow("memoryParameters")
        return {"hard_limit": NO_LIMIT_KIB}

    # --- the guest -----------------------------------------------------------------------------------------------

    async def guest(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one host agent; requests are worked on side by side, as by the real guest agent."""
        under_way: set[asyncio.Task[None]] = set()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                if line.strip():
                    task = asyncio.create_task(self._answer(json.loads(line), writer), name=f"fake:{self.title}")
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
        for task in under_way:
            task.cancel()
        writer.close()

    async def _answer(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        method, params = message["method"], message.get("params", {})
        self.calls[f"guest {method}"] += 1
        await asyncio.sleep(self.how.call_s)
        answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "hello": self._hello,
            "status": self._status,
            "cpus.set": self._cpus_set,
            "application.deflate": self._deflate,
            "application.status": self._released,
            "application.reinflate": lambda p: {"request_id": p["request_id"], "state": "promised"},
        }
        if method in answers:
            reply = {"result": answers[method](params)}
        else:
            reply = {"error": {"code": -32601, "message": f"no method {method}"}}
        writer.write(json.dumps({"jsonrpc": "2.0", "id": message.get("id"), **reply}).encode() + b"\n")

    def _hello(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"protocol": PROTOCOL, "nonce": params["nonce"], "agent": "1", "boot_id": "b", "capabilities": []}

    def _status(self, _: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            total = self.balloon.size_mib + self.plugged.look()
        available = max(total - USED_MIB - self.cache_mib, 0.0)
        return {
            "boot_id": "b",
            "uptime_s": 1000.0,
            "cpus": {
                "present": list(range(VCPUS)),
                "online": sorted(self.online),
                "unpluggable": sorted(self.online - {0}, reverse=True),
            },
            "memory": {
                "total_mib": total,
                "available_mib": available,
                "reserve_mib": 48.0,
                "floor_mib": total - available + 48.0,
                "unpluggable_mib": max(available - 48.0, 0.0),
            },
        }

    def _cpus_set(self, params: dict[str, Any]) -> dict[str, Any]:
        self.online = set(params["online"])
        return {"online": sorted(self.online), "failed": []}

    def _deflate(self, params: dict[str, Any]) -> dict[str, Any]:
        self.polls_left[params["request_id"]] = self.how.polls
        promised = {"memory_mib": CACHE_MIB - KEPT_MIB}
        return {"request_id": params["request_id"], "state": "promised", "promised": promised, "expected_s": 1.0}

    def _released(self, params: dict[str, Any]) -> dict[str, Any]:
        request_id = params["request_id"]
        left = self.polls_left.get(request_id, 0)
        self.polls_left[request_id] = left - 1
        if left > 0:
            return {"request_id": request_id, "state": "running"}
        self.cache_mib = KEPT_MIB
        return {"request_id": request_id, "state": "released", "released": {"memory_mib": CACHE_MIB - KEPT_MIB}}


class SlowLibvirt:
    """All domains. `open` stands in for ``libvirt.open``."""

    def __init__(self, how: Slowness) -> None:
        self.how = how
        self.domains: dict[str, SlowDomain] = {}
        self._servers: list[asyncio.Server] = []
        #: Connections that were opened.
        self.opened = 0

    async def add(self, name: str, socket: Path, intent: str) -> None:
        """A running domain, its guest listening."""
        domain = self.domains[name] = SlowDomain(name, socket, intent, self.how)
        self._servers.append(await asyncio.start_unix_server(domain.guest, str(socket)))

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def open(self, _uri: str) -> SlowConnection:
        self.opened += 1
        return SlowConnection(self)


class SlowConnection:
    """What the agent asks of a connection; libvirt's methods."""

    def __init__(self, world: SlowLibvirt) -> None:
        self._world = world

    def isAlive(self) -> int:
        return 1

    def setKeepAlive(self, interval: int, count: int) -> None:
        return None

    def domainEventRegisterAny(self, _domain: Any, event: int, callback: Any, _opaque: Any) -> int:
        if event == libvirt.VIR_DOMAIN_EVENT_ID_MEMORY_DEVICE_SIZE_CHANGE:
            for domain in self._world.domains.values():
                domain.tell = callback
        return 1

    def close(self) -> int:
        return 0

    def _slow(self) -> None:
        time.sleep(self._world.how.call_s)

    def getVersion(self) -> int:
        self._slow()
        return 7_002_000

    def getLibVersion(self) -> int:
        self._slow()
        return 9_000_000

    def listAllDomains(self, flags: int = 0) -> list[SlowDomain]:
        self._slow()
        return list(self._world.domains.values())

    def lookupByName(self, name: str) -> SlowDomain:
        domain = self._world.domains[name]
        domain.slow("lookupByName")
        return domain

    def getAllDomainStats(self, stats: int, flags: int = 0) -> list[tuple[SlowDomain, dict[str, Any]]]:
        self._slow()
        # As many entries as libvirt 9.0 has with a QEMU domain's balloon and vCPUs.
        row = {f"balloon.{name}": 1000 for name in BALLOON} | {"state.state": 1, "state.reason": 1}
        row |= {f"vcpu.{cpu}.{name}": 10**9 for cpu in range(VCPUS) for name in ("state", "time", "wait", "delay")}
        row |= {"vcpu.current": VCPUS, "vcpu.maximum": VCPUS}
        return [
            (domain, row | {"balloon.current": domain.balloon.size_mib * 1024})
            for domain in self._world.domains.values()
        ]

"""In the place of libvirt: a connection with domains of their own XML, which notes the thread of each call.

It has what `hostagent.libvirt.libvirt_hypervisor.LibvirtHypervisor` asks for; sizes are taken over at once.
"""

from __future__ import annotations

import threading
import time
import uuid
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import libvirt

from hostagent.libvirt.libvirt_hypervisor import GUEST_CHANNEL
from hostagent.state import intents

TUNED = ("total_bytes_sec", "total_iops_sec", "read_bytes_sec", "write_bytes_sec")
#: Each call of a connection or domain: its name and its thread.
Calls = list[tuple[str, int]]


class _Noted:
    """Everything public that is asked for is noted."""

    _calls: Calls

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._calls.append((name, threading.get_ident()))
        return super().__getattribute__(name)


class StandIn(_Noted):
    """A connection.

    :param channels: directory of the guests' sockets.
    """

    def __init__(self, channels: Path) -> None:
        self._calls: Calls = []
        self._channels = channels
        self._domains: dict[str, StandInDomain] = {}

    def isAlive(self) -> bool:
        return True

    def setKeepAlive(self, interval: int, count: int) -> None:
        pass

    def close(self) -> None:
        pass

    def getVersion(self) -> int:
        return 7_002_011

    def getLibVersion(self) -> int:
        return 9_000_000

    def domainEventRegisterAny(self, *arguments: Any) -> int:
        return 0

    def listAllDomains(self) -> list[StandInDomain]:
        return list(self._domains.values())

    def lookupByName(self, name: str) -> StandInDomain:
        if name not in self._domains:
            error = libvirt.libvirtError(f"no domain {name}")
            error.err = (libvirt.VIR_ERR_NO_DOMAIN, 0, f"no domain {name}", 0, "", "", "", 0, 0)
            raise error
        return self._domains[name]

    def getAllDomainStats(self, what: int, flags: int) -> list[tuple[StandInDomain, dict[str, Any]]]:
        return [(domain, domain._stats()) for domain in self._domains.values()]

    def defineXML(self, xml: str) -> StandInDomain:
        domain = StandInDomain(self, ElementTree.fromstring(xml))
        self._domains[domain._name] = domain
        return domain


class StandInDomain(_Noted):
    """A domain: its live XML, with sizes in KiB as libvirt writes them, and what stands outside of it."""

    def __init__(self, connection: StandIn, root: ElementTree.Element) -> None:
        self._calls = connection._calls
        self._connection = connection
        self._root = root
        self._name = root.findtext("name", "")
        self._state = libvirt.VIR_DOMAIN_SHUTOFF
        self._scheduler: dict[str, int] = {"vcpu_quota": -1, "vcpu_period": 100_000, "cpu_shares": 1024}
        #: By flag: of the running domain and of its definition.
        self._tuned: dict[int, dict[str, Any]] = {
            flag: dict.fromkeys(TUNED, 0) for flag in (libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG)
        }
        element = root.find(f"./metadata/{{{intents.NAMESPACE}}}{intents.ELEMENT}")
        self._metadata = ElementTree.tostring(element, encoding="unicode") if element is not None else ""
        for sized in root.iter():
            if sized.get("unit") == "MiB" and sized.text and sized.text.strip():
                sized.set("unit", "KiB")
                sized.text = str(int(sized.text) * 1024)
            elif sized.tag == "cell":
                sized.set("memory", str(int(sized.get("memory", "0")) * 1024))
                sized.set("unit", "KiB")
        target = root.find("./devices/memory/target")
        assert target is not None
        self._current = ElementTree.SubElement(target, "current", unit="KiB")
        self._current.text = target.findtext("requested")
        self._balloon_kib = sum(int(cell.get("memory", "0")) for cell in root.findall("./cpu/numa/cell"))
        for channel in root.findall("./devices/channel"):
            name = channel.find("target")
            if name is not None and name.get("name") == GUEST_CHANNEL:
                ElementTree.SubElement(channel, "source", path=str(connection._channels / self._name))

    @property
    def _held_mib(self) -> float:
        return (self._balloon_kib + int(self._current.text or 0)) / 1024

    def _stats(self) -> dict[str, Any]:
        vcpus = self._vcpus()
        times = {f"vcpu.{cpu}.time": 0 for cpu in range(vcpus)}
        return {"state.state": self._state, "vcpu.current": vcpus, "balloon.current": self._held_mib * 1024, **times}

    def _vcpus(self) -> int:
        vcpu = self._root.find("vcpu")
        return int(vcpu.get("current") or 0) if vcpu is not None else 0

    def name(self) -> str:
        return self._name

    def UUIDString(self) -> str:
        return str(uuid.UUID(self._root.findtext("uuid", "")))

    def XMLDesc(self, flags: int = 0) -> str:
        return ElementTree.tostring(self._root, encoding="unicode")

    def isActive(self) -> bool:
        return bool(self._state != libvirt.VIR_DOMAIN_SHUTOFF)

    def isPersistent(self) -> bool:
        return True

    def state(self) -> list[int]:
        return [self._state, 0]

    def metadata(self, kind: int, namespace: str, flags: int = 0) -> str:
        return self._metadata

    def hasManagedSaveImage(self) -> int:
        return 0

    def setMetadata(self, kind: int, text: str, prefix: str, namespace: str, flags: int) -> None:
        self._metadata = text

    def createWithFlags(self, flags: int) -> None:
        self._state = libvirt.VIR_DOMAIN_PAUSED
        self._tuned[libvirt.VIR_DOMAIN_AFFECT_LIVE] = dict(self._tuned[libvirt.VIR_DOMAIN_AFFECT_CONFIG])

    def suspend(self) -> None:
        self._state = libvirt.VIR_DOMAIN_PAUSED

    def resume(self) -> None:
        self._state = libvirt.VIR_DOMAIN_RUNNING

    def destroyFlags(self, flags: int) -> None:
        self._state = libvirt.VIR_DOMAIN_SHUTOFF

    def undefineFlags(self, flags: int) -> None:
        del self._connection._domains[self._name]

    def schedulerParametersFlags(self, flags: int) -> dict[str, int]:
        return dict(self._scheduler)

    def setSchedulerParametersFlags(self, parameters: dict[str, int], flags: int) -> None:
        if flags & libvirt.VIR_DOMAIN_AFFECT_LIVE or "cpu_shares" in parameters:
            self._scheduler |= parameters

    def memoryParameters(self, flags: int) -> dict[str, int]:
        return {}

    def memoryStats(self) -> dict[str, int]:
        return {
            "actual": self._balloon_kib,
            "last_update": int(time.time()),
            "usable": int(self._held_mib - 180) * 1024,
        }

    def setMemoryFlags(self, kib: int, flags: int) -> None:
        self._balloon_kib = kib

    def updateDeviceFlags(self, xml: str, flags: int) -> None:
        requested = self._root.find("./devices/memory/target/requested")
        if flags & libvirt.VIR_DOMAIN_AFFECT_LIVE and requested is not None:
            self._current.text = requested.text = ElementTree.fromstring(xml).findtext("target/requested")

    def blockIoTune(self, disk: str, flags: int) -> dict[str, Any]:
        return dict(self._tuned[flags])

    def setBlockIoTune(self, disk: str, parameters: dict[str, Any], flags: int) -> None:
        self._tuned[flags] |= parameters
        device = self._root.find("./devices/disk")
        if device is not None and device.find("iotune") is None:
            ElementTree.SubElement(ElementTree.SubElement(device, "iotune"), "group_name").text = "ebbtide"

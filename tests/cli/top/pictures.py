"""A small cluster as `ebb top` gets it, and the model's lines as text."""

from __future__ import annotations

from typing import Any

from ebbtide.cli.top.drawing import text_of
from ebbtide.cli.top.model import Top, View
from ebbtide.client.connection import Changed
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import Event
from ebbtide.messages.hosts import HostStatus
from ebbtide.messages.vms import ClusterVM

NOW = 1_770_000_000.0


def size(cpu_cores: float, memory_mib: float) -> Vector:
    return Vector(cpu_cores=cpu_cores, memory_mib=memory_mib)


def host(name: str, free_cores: float = 4.0, **more: Any) -> HostStatus:
    """Eight cores and 16 GiB, of which half the memory is free."""
    body: dict[str, Any] = {
        "id": name, "url": "http://127.0.0.1:7101", "state": "ready", "seen_at": NOW, "capacity": size(8, 16384),
        "free": size(free_cores, 8192), "deflatable": size(1, 2048), "accelerator": "kvm", "vms": ("a", "b"),
    }  # fmt: skip
    return HostStatus(**{**body, **more})


def vm(name: str, cores: float = 2.0, on: str | None = "host-a", **more: Any) -> ClusterVM:
    """Sold with two cores and 2 GiB, never less than half a core and 512 MiB."""
    body: dict[str, Any] = {
        "name": name, "host": on, "state": "running", "priority": "deflatable", "nominal": size(2, 2048),
        "minimum": size(0.5, 512), "current": size(cores, 2048), "generation": 1, "sentence": f"{name} was placed",
    }  # fmt: skip
    return ClusterVM(**{**body, **more})


def event(number: int, sentence: str = "web was placed") -> Event:
    return Event(id=number, at=NOW, vm="web", host="host-a", kind="placed", sentence=sentence)


def cluster(view: View = View.HOSTS) -> Top:
    """Three hosts and four VMs, one of which is deflated and one of which is off."""
    top = Top("http://127.0.0.1:7100", view)
    hosts = [host("host-a", 1.0), host("host-b", 6.0), host("host-c", state="silent", vms=())]
    top.put_hosts(Changed(hosts, changes=5))
    vms = [vm("db", 0.5), vm("web"), vm("batch-1", 1.5, "host-b"), vm("batch-2", on="host-b", state="preempted")]
    top.put_vms(Changed(vms, changes=5))
    return top


def picture(top: Top, width: int = 80, height: int = 24) -> list[str]:
    """The screen as text; exactly so high, and nowhere wider."""
    lines = top.lines(width, height, NOW)
    assert len(lines) == height
    assert all(sum(len(text) for text, _ in line) <= width for line in lines)
    return [text_of(line) for line in lines]


def names(top: Top, width: int = 80) -> list[str]:
    """The first words of the table's rows, in their order."""
    rows = picture(top, width, 24)[4:]
    end = next(number for number, row in enumerate(rows) if not row or row.startswith(("events", "layers")))
    return [row.split()[0] for row in rows[:end]]


def press(top: Top, *keys: str) -> Top:
    for key in keys:
        top.press(key)
    return top

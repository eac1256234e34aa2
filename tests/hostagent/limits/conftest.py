"""Memory limits over a kernel and a libvirt that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostagent.limits import memory_limit
from hostagent.limits.memory_limit import MemoryLimits
from tests.hostagent.limits.limited_vms import VM, Limits, Machine


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Limits:
    def make(**vms: VM) -> tuple[Machine, MemoryLimits]:
        machine = Machine(**vms)
        for domain in machine.vms:
            (tmp_path / f"{domain}.pid").write_text("1")
        monkeypatch.setattr(memory_limit, "OBSERVE_S", 0.001)
        monkeypatch.setattr(memory_limit, "look", machine.look)
        monkeypatch.setattr(memory_limit, "host_swap", lambda: machine.swap)
        monkeypatch.setattr(memory_limit, "qemu_pid", lambda domain, _files: domain)
        monkeypatch.setattr(memory_limit, "MemoryGroup", lambda domain: machine.vms[domain])
        return machine, MemoryLimits(machine, tmp_path)  # type: ignore[arg-type]

    return make

"""The accelerator probe, with programs that stand in for QEMU."""

from __future__ import annotations

import errno
import json
import os
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from hostagent import running
from hostagent.mechanisms import accelerator
from hostagent.mechanisms.accelerator import MARKER, Accelerator, probe_accelerator
from hostagent.options import HostAgentOptions

OPTIONS = HostAgentOptions(id="host-a", capacity="auto", token_file=Path("token"))


class Bench:
    """A stand-in for QEMU, a kernel and a device, all in a directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.qemu = home / "qemu"
        self.kernel = home / "vmlinuz"
        self.device = home / "kvm"
        self.cache = home / "cache" / "accelerator.json"
        self.pids = home / "pids"
        self.kernel.touch()
        self.device.touch()

    def qemu_does(self, body: str, version: str = "QEMU emulator version 1") -> None:
        self.qemu.write_text(
            f"#!/bin/sh\nif [ \"$1\" = --version ]; then echo '{version}'; exit; fi\necho $$ >>{self.pids}\n{body}\n"
        )
        self.qemu.chmod(0o755)

    def found(self, kernel: Path | None = None, time_limit_s: float = 5.0) -> Accelerator:
        return probe_accelerator(
            kernel or self.kernel,
            None,
            self.cache,
            qemu=str(self.qemu),
            kvm_device=self.device,
            time_limit_s=time_limit_s,
        )

    def probe(self, kernel: Path | None = None, time_limit_s: float = 5.0) -> tuple[str, str, bool]:
        found = self.found(kernel, time_limit_s)
        return found.kind, found.reason, found.cached

    def boots(self) -> int:
        return len(self.pids.read_text().split()) if self.pids.exists() else 0


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_guest_that_boots_under_kvm_makes_it_kvm(bench: Bench) -> None:
    bench.qemu_does(f"echo noise; printf '{MARKER}'; exec sleep 60")
    kind, reason, cached = bench.probe()
    assert (kind, cached) == ("kvm", False)
    assert "booted" in reason


@pytest.mark.slow
def test_a_guest_that_hangs_is_killed_at_the_limit_and_makes_it_emulation(bench: Bench) -> None:
    bench.qemu_does("exec sleep 60")
    begin_s = time.monotonic()
    # By then a busy machine, too, has begun the program, which says its pid.
    kind, reason, _ = bench.probe(time_limit_s=3.0)
    assert time.monotonic() - begin_s < 30
    assert kind == "qemu"
    assert "within 3 s" in reason
    with pytest.raises(ProcessLookupError):
        os.kill(int(bench.pids.read_text()), 0)


def test_a_qemu_that_fails_gives_its_last_words_as_the_reason(bench: Bench) -> None:
    bench.qemu_does("echo first; echo 'failed to set MSR' >&2; exit 1")
    kind, reason, _ = bench.probe()
    assert kind == "qemu"
    assert "failed to set MSR" in reason


def test_the_outcome_of_a_boot_is_remembered(bench: Bench) -> None:
    bench.qemu_does("exit 1")
    first = bench.probe()
    assert bench.probe() == (first[0], first[1], True)
    assert bench.boots() == 1


@pytest.mark.parametrize("hours", [2, -2], ids=["long ago", "in the future"])
@pytest.mark.parametrize(("does", "again"), [("exit 1", True), (f"echo {MARKER}", False)], ids=["qemu", "kvm"])
def test_that_kvm_works_is_remembered_for_good_and_that_it_does_not_for_an_hour(
    bench: Bench, hours: int, does: str, again: bool
) -> None:
    bench.qemu_does(does)
    bench.probe()
    stored = json.loads(bench.cache.read_text())
    then = datetime.fromisoformat(stored["probed_at"]) - timedelta(hours=hours)
    bench.cache.write_text(json.dumps(stored | {"probed_at": then.isoformat()}))
    bench.qemu_does(f"echo {MARKER}")
    assert bench.probe()[::2] == ("kvm", not again)


def test_an_agent_says_in_its_log_that_its_vms_are_emulated_and_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.qemu_does("echo 'no such CPU' >&2; exit 1")
    monkeypatch.setattr(running, "probe_accelerator", lambda *_: bench.found())
    with capture_logs() as logs:
        assert running._accelerator(OPTIONS)[0] == "qemu"
        assert [(one["log_level"], "no such CPU" in one["why"]) for one in logs] == [("warning", True)]
        bench.qemu_does(f"echo {MARKER}", version="QEMU emulator version 2")
        assert running._accelerator(OPTIONS)[0] == "kvm"
        assert running._accelerator(OPTIONS.model_copy(update={"accelerator": "qemu"}))[0] == "qemu"
    assert len(logs) == 1


def test_another_qemu_is_tried_again(bench: Bench) -> None:
    bench.qemu_does("exit 1")
    bench.probe()
    bench.qemu_does(f"echo {MARKER}", version="QEMU emulator version 2")
    assert bench.probe()[::2] == ("kvm", False)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1}'])
def test_a_damaged_memory_is_no_memory(bench: Bench, text: str) -> None:
    bench.cache.parent.mkdir()
    bench.cache.write_text(text)
    bench.qemu_does(f"echo {MARKER}")
    assert bench.probe()[::2] == ("kvm", False)


@pytest.mark.parametrize("stage", ["mkdir", "write_text", "replace"])
def test_an_outcome_that_cannot_be_written_counts_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    bench.qemu_does(f"echo {MARKER}")

    def full(*_: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Path, stage, full)
        kind, reason, cached = bench.probe()
    assert (kind, cached) == ("kvm", False)
    assert reason.endswith("it cannot be remembered: [Errno 28] No space left on device")
    assert not bench.cache.parent.exists() or not list(bench.cache.parent.iterdir())
    assert bench.probe()[::2] == ("kvm", False)
    assert bench.probe()[::2] == ("kvm", True)


def test_without_a_device_nothing_is_booted_or_remembered(bench: Bench) -> None:
    bench.qemu_does(f"echo {MARKER}")
    bench.device.unlink()
    kind, reason, _ = bench.probe()
    assert kind == "qemu"
    assert str(bench.device) in reason
    assert bench.boots() == 0
    assert not bench.cache.exists()


def test_without_qemu_nothing_is_remembered(bench: Bench) -> None:
    kind, reason, _ = bench.probe()
    assert kind == "qemu"
    assert "not installed" in reason
    assert not bench.cache.exists()


@pytest.mark.parametrize("name", ["qemu-system-x86_64", "qemu-kvm", "libexec/qemu-kvm"])
def test_qemu_is_found_by_the_names_of_other_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(accelerator, "QEMUS", (*accelerator.QEMUS[:2], str(tmp_path / "libexec/qemu-kvm")))
    assert accelerator.find_qemu(str(tmp_path)) is None
    program = tmp_path / name
    program.parent.mkdir(exist_ok=True)
    program.touch(0o755)
    assert accelerator.find_qemu(str(tmp_path)) == str(program)


def test_without_any_kernel_nothing_is_remembered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostagent.mechanisms.accelerator.host_kernel", lambda: None)
    bench.qemu_does(f"echo {MARKER}")
    kind, reason, _ = bench.probe(kernel=bench.home / "none")
    assert kind == "qemu"
    assert "no kernel" in reason
    assert not bench.cache.exists()

"""What is remembered of the ACPI unplug probe, and what its guest has to pass, without a guest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import libvirt
import pytest

from hostagent.mechanisms import acpi_probe
from hostagent.mechanisms.accelerator import MARKER
from hostagent.mechanisms.acpi_probe import UNTRIED, remember, try_unplug, why_not

KEY = {"kernel": "6.1", "qemu": "7002000", "libvirt": "9000000", "accelerator": "kvm"}


def test_a_verdict_counts_for_the_host_state_it_was_found_on(tmp_path: Path) -> None:
    verdict = tmp_path / "deep" / "acpi.json"
    assert why_not(verdict, KEY) == UNTRIED
    remember(verdict, KEY, True, "passed")
    assert why_not(verdict, KEY) == ""
    assert why_not(verdict, KEY | {"qemu": "8000000"}) == UNTRIED
    remember(verdict, KEY, False, "the count did not become 2")
    assert why_not(verdict, KEY) == "the count did not become 2"
    assert [path.name for path in verdict.parent.iterdir()] == ["acpi.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1}', '{"passed": true}'])
def test_a_damaged_verdict_is_none(tmp_path: Path, text: str) -> None:
    verdict = tmp_path / "acpi.json"
    verdict.write_text(text)
    assert why_not(verdict, KEY) == UNTRIED


class FakeDomain:
    """A domain that boots at once and does what a test says."""

    def __init__(self, console: Path) -> None:
        self.console = console
        self.vcpus = acpi_probe.VCPUS
        self.alive = True
        self.asked: list[int] = []
        self.refuses: Callable[[int], bool] = lambda count: False
        self.resets = 0
        self.boot()

    def boot(self) -> None:
        with self.console.open("a") as console:
            console.write(f"{MARKER}\n")

    def setVcpusFlags(self, count: int, flags: int) -> None:
        self.asked.append(count)
        if self.refuses(count):
            raise libvirt.libvirtError("vcpu unplug request timed out")
        self.vcpus = count

    def vcpusFlags(self, flags: int) -> int:
        if not self.alive:
            raise libvirt.libvirtError("domain is not running")
        return self.vcpus

    def reset(self) -> None:
        self.resets += 1
        self.boot()

    def isActive(self) -> bool:
        return self.alive

    def destroy(self) -> None:
        if not self.alive:
            raise libvirt.libvirtError("domain is not running")
        self.alive = False


class FakeConnection:
    def __init__(self, prepare: Callable[[FakeDomain], None] = lambda domain: None) -> None:
        self.prepare = prepare
        self.domain: FakeDomain | None = None
        self.directory: Path | None = None

    def createXML(self, xml: str, flags: int) -> Any:
        assert flags == libvirt.VIR_DOMAIN_START_AUTODESTROY
        console = Path(xml.partition("<source path='")[2].partition("'")[0])
        self.directory = console.parent
        self.domain = FakeDomain(console)
        self.prepare(self.domain)
        return self.domain


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acpi_probe, "COUNT_LIMIT_S", 0.3)
    monkeypatch.setattr(acpi_probe, "BOOT_LIMIT_S", 0.3)


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "vmlinuz"
    path.touch()
    return path


def gone(connection: FakeConnection) -> bool:
    assert connection.domain is not None
    assert connection.directory is not None
    return not connection.domain.alive and not connection.directory.exists()


def test_a_guest_that_does_all_of_it_passes_one_vcpu_at_a_time(kernel: Path) -> None:
    connection = FakeConnection()
    assert try_unplug(connection, kernel, "kvm") == (
        True,
        "a throw-away guest passed ACPI vCPU unplug, plug and reset",
    )
    assert connection.domain is not None
    assert connection.domain.asked == [2, 3, 2, 3]
    assert connection.domain.resets == 2
    assert gone(connection)


def test_a_count_that_does_not_follow_fails_with_libvirts_words(kernel: Path) -> None:
    def stubborn(domain: FakeDomain) -> None:
        domain.refuses = lambda count: count < 3

    connection = FakeConnection(stubborn)
    passed, reason = try_unplug(connection, kernel, "kvm")
    assert not passed
    assert reason == (
        "a throw-away guest did not pass ACPI vCPU unplug: unplug: the count did not become 2 within 0.3 s "
        "(vcpu unplug request timed out)"
    )
    assert gone(connection)


def test_a_qemu_that_dies_at_a_reset_fails_and_leaves_nothing(kernel: Path) -> None:
    def crashes(domain: FakeDomain) -> None:
        def reset() -> None:
            domain.alive = False

        domain.reset = reset  # type: ignore[method-assign]

    connection = FakeConnection(crashes)
    passed, reason = try_unplug(connection, kernel, "kvm")
    assert not passed
    assert reason.endswith("boot number 2 did not come up within 0.3 s: QEMU ended")
    assert gone(connection)


def test_a_domain_that_cannot_be_started_is_no_pass(kernel: Path) -> None:
    class Refusing(FakeConnection):
        def createXML(self, xml: str, flags: int) -> Any:
            super().createXML(xml, flags)
            raise libvirt.libvirtError("no KVM")

    connection = Refusing()
    assert try_unplug(connection, kernel, "kvm") == (False, "a throw-away guest could not be tried: no KVM")
    assert connection.directory is not None
    assert not connection.directory.exists()

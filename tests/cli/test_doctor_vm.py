"""`ebb vm doctor VM`, against libvirt's own test driver."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from ebbtide.cli import doctor_vm, main
from ebbtide.cli.doctor_vm import VMDiagnosis, examine_vm
from ebbtide.cli.schemas import schema_of
from ebbtide.deflation.cascade.instructions import GuestKind
from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.cascade.ordinary import Statement, gifts
from ebbtide.errors import EbbError
from ebbtide.lab import paths
from hostagent.mechanisms import acpi_probe
from hostagent.mechanisms.layers import kind_of
from tests.unit.layer_domains import CHANNEL, HEALTHY
from tests.unit.test_layers import ADD_CHANNEL, NO_CHANNEL, SECOND_VCPU

DOMAIN = """<domain type='test'><name>{name}</name><memory unit='MiB'>1024</memory><vcpu>{vcpus}</vcpu>
<os><type>hvm</type></os><devices>{devices}</devices></domain>"""
DISK = "<disk type='file' device='disk'><source file='/a'/><target dev='vda'/></disk>"


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A libvirt with one bare domain, one managed VM, and two managed VMs of one name."""
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "cache"))
    names = ("bare", "ebb-host-a.web", "ebb-host-a.twin", "ebb-host-b.twin")
    rows = [DOMAIN.format(name=name, vcpus=1 if name == "bare" else 4, devices=DISK) for name in names]
    node = tmp_path / "node.xml"
    node.write_text(f"<node>{''.join(rows)}</node>")
    return f"test://{node}"


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main.app, ["vm", "doctor", *arguments])


def probe(*arguments: str) -> Result:
    return CliRunner().invoke(main.app, ["doctor", "--probe-acpi", *arguments])


def test_the_table_names_every_mechanism_and_each_fix_stands_once(uri: str) -> None:
    result = doctor("bare", "--uri", uri)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("bare, running\n")
    for mechanism in Mechanism:
        assert re.search(rf" {mechanism.value} +(available|BLOCKED) ", result.output), mechanism
    assert re.search(rf"application +application +BLOCKED +{re.escape(NO_CHANNEL)} *\n", result.output)
    assert re.search(r"hypervisor +disk-bandwidth +available +on all disks together", result.output)
    assert result.output.count("Give the guest agent its channel") == 1
    channel = re.sub(r"(virt-xml|enable) web", r"\1 bare", ADD_CHANNEL)
    needs_it = "[application, cold-reclaim, cpu-offline, virtio-mem, dimm, memory-limit]"
    assert f"\n{needs_it}\n{channel}\n" in result.output
    assert f"\n[cpu-offline, cpu-unplug]\n{SECOND_VCPU.replace('virt-xml web', 'virt-xml bare')}\n" in result.output
    assert "To put it right; XML counts from the VM's next start:" in result.output


def test_as_json_each_mechanism_has_its_reason_and_its_fixes(uri: str) -> None:
    result = doctor("web", "--uri", uri, "-o", "json")
    found = json.loads(result.output)
    assert (found["domain"], found["running"]) == ("ebb-host-a.web", True)
    rows = {row["mechanism"]: row for row in found["mechanisms"]}
    assert list(rows) == [mechanism.value for mechanism in Mechanism]
    assert rows["application"] == {
        "layer": "application",
        "mechanism": "application",
        "available": False,
        "reason": NO_CHANNEL,
        "fixes": [re.sub(r"(virt-xml|enable) web", r"\1 ebb-host-a.web", ADD_CHANNEL)],
    }
    assert rows["disk-bandwidth"]["available"] is True


def test_a_domain_that_does_not_run_is_looked_at_as_it_would_start(tmp_path: Path, uri: str) -> None:
    node = tmp_path / "off.xml"
    off = DOMAIN.format(name="off", vcpus=2, devices=DISK)
    state = "xmlns:test='http://libvirt.org/schemas/domain/test/1.0'"
    off = off.replace("<domain ", f"<domain {state} ").replace("<devices>", "<test:runstate>5</test:runstate><devices>")
    node.write_text(f"<node>{off}</node>")
    found = examine_vm("off", f"test://{node}")
    assert not found.running
    assert len(found.findings) == len(Mechanism)


def test_an_unknown_name_and_one_of_several_vms_are_told(uri: str) -> None:
    with pytest.raises(EbbError, match="there is no VM and no domain nobody"):
        examine_vm("nobody", uri)
    with pytest.raises(EbbError, match=r"several VMs: ebb-host-a\.twin, ebb-host-b\.twin"):
        examine_vm("twin", uri)
    assert examine_vm("ebb-host-b.twin", uri).domain == "ebb-host-b.twin"


def test_a_libvirt_that_does_not_answer_is_named() -> None:
    with pytest.raises(Exception, match="libvirt does not answer at qemu"):
        examine_vm("web", "qemu+unix:///system?socket=/nonexistent")


def test_the_help_has_examples_and_the_probe_takes_no_vm(uri: str) -> None:
    assert "ebb vm doctor web" in doctor("--help").output
    assert probe("web", "--uri", uri).exit_code == 2


def test_under_emulation_no_guest_is_tried(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_vm, "probe_accelerator", lambda *_: _Found("qemu"))
    monkeypatch.setattr(acpi_probe, "try_unplug", lambda *_: pytest.fail("a guest was started"))
    result = probe("--uri", uri)
    assert result.exit_code == 0, result.output
    assert "vCPUs are not unplugged: ACPI vCPU unplug is off under emulation" in result.output


def test_under_kvm_the_outcome_is_remembered_for_the_agents(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_vm, "probe_accelerator", lambda *_: _Found("kvm"))
    monkeypatch.setattr(doctor_vm, "_kernel", lambda: tmp_path / "vmlinuz")
    monkeypatch.setattr(acpi_probe, "try_unplug", lambda *_: (False, "a throw-away guest did not pass: no"))
    result = probe("--uri", uri, "-o", "json")
    assert json.loads(result.stdout) == {"passed": False, "reason": "a throw-away guest did not pass: no"}
    rows = {found.mechanism: found for found in examine_vm("web", uri).findings}
    assert "a throw-away guest did not pass: no" in rows[Mechanism.CPU_UNPLUG].reason


def test_an_outcome_that_cannot_be_remembered_is_told_all_the_same_and_leaves_nothing(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_vm, "probe_accelerator", lambda *_: _Found("kvm"))
    monkeypatch.setattr(doctor_vm, "_kernel", lambda: tmp_path / "vmlinuz")
    monkeypatch.setattr(acpi_probe, "try_unplug", lambda *_: (False, "a throw-away guest did not pass: no"))
    verdict = paths.acpi_verdict()
    verdict.mkdir(parents=True)
    with pytest.raises(EbbError, match=r"did not pass: no; it cannot be kept for the agents: .*Is a directory"):
        doctor_vm.probe_acpi(uri, lambda step: None)
    assert list(verdict.parent.iterdir()) == [verdict]


class _Found:
    def __init__(self, kind: str) -> None:
        self.kind = kind


@pytest.mark.parametrize(
    ("channels", "kind"),
    [
        ("", GuestKind.BALLOON),
        ("<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>", GuestKind.BALLOON),
        (
            "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0' state='connected'/></channel>",
            GuestKind.QEMU_GUEST_AGENT,
        ),
        (
            "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0' state='connected'/></channel>"
            "<channel type='unix'><target type='virtio' name='io.ebbtide.guest.0'/></channel>",
            GuestKind.AGENT,
        ),
    ],
)
def test_the_kind_of_a_guest_is_what_of_it_answers(channels: str, kind: GuestKind) -> None:
    assert kind_of(HEALTHY.replace(CHANNEL, channels)) == (kind, 4)


def test_each_kind_above_its_own_is_shown_with_what_it_would_give_more() -> None:
    said = Statement(100.0, 700.0, 2000.0)
    balloon = VMDiagnosis("web", True, (), GuestKind.BALLOON, gifts(4, said, 101.0))
    assert [(gift.memory_mib, gift.cpus, words) for gift, words in balloon.steps_up()] == [
        (500.0, 0, "as it is"),
        (500.0, 3, "3 more cores off line"),
        (600.0, 3, "100 MiB more, 3 more cores off line, what its applications release"),
    ]
    silent = VMDiagnosis("web", True, (), GuestKind.QEMU_GUEST_AGENT, gifts(1, said, 200.0))
    assert [(gift.memory_mib, gift.cpus, words) for gift, words in silent.steps_up()] == [
        (None, 0, "as it is"),
        (None, 0, "what its applications release"),
    ]
    assert VMDiagnosis("off", False, (), GuestKind.BALLOON).steps_up() == []


def test_the_kind_and_what_it_gives_are_printed_and_in_the_json(uri: str) -> None:
    result = doctor("web", "--uri", uri)
    assert "guest: balloon, nothing answers but a balloon driver" in result.output
    assert re.search(r"qemu-guest-agent +not known +3 +3 more cores off line", result.output)
    found = json.loads(doctor("web", "--uri", uri, "-o", "json").output)
    jsonschema.validate(found, schema_of("vm doctor"))
    assert found["guest_kind"] == "balloon"
    assert found["gives"][-1] == {"guest_kind": "agent", "memory_mib": None, "cpu_cores_offline": 3}

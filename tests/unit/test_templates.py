"""Domain templates: names, sizes, escaping."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostagent.domain_xml.templates import (
    MEMORY_ALIAS,
    DomainParameters,
    DomainTemplate,
    TemplateError,
    render_domain,
    tap_name,
)

BASE = DomainParameters(
    name="lab-a",
    uuid="0b9e9c5e-6f5c-4c0e-8f59-3f7a3c1d2e4f",
    cpu_cores=2.0,
    memory_mib=1024,
    accelerator="qemu",
    kernel=Path("/images/vmlinuz"),
    initrd=Path("/images/initrd"),
    disk=Path("/vms/a.qcow2"),
    console=Path("/vms/console.log"),
)


def rendered(**changes: Any) -> ElementTree.Element:
    return ElementTree.fromstring(render_domain(DomainTemplate.load("lab"), dataclasses.replace(BASE, **changes)))


def test_half_of_the_memory_is_a_device_that_is_asked_for_in_full() -> None:
    domain = rendered()
    cell = domain.find("./cpu/numa/cell")
    assert cell is not None
    assert cell.get("memory") == "512"
    assert domain.findtext("./devices/memory/target/size") == "512"
    assert domain.findtext("./devices/memory/target/requested") == "512"
    alias = domain.find("./devices/memory/alias")
    assert alias is not None
    assert alias.get("name") == MEMORY_ALIAS


def test_a_small_vm_boots_with_all_it_has_and_keeps_an_empty_device() -> None:
    domain = rendered(memory_mib=256)
    assert domain.findtext("./devices/memory/target/requested") == "0"
    assert domain.findtext("./devices/memory/target/size") == "128"


@given(memory_mib=st.integers(64, 1 << 20), extra_mib=st.integers(0, 1 << 20))
def test_boot_memory_and_request_add_up_to_nominal_and_the_device_reaches_the_ceiling(
    memory_mib: int, extra_mib: int
) -> None:
    layout = dataclasses.replace(BASE, memory_mib=memory_mib, ceiling_memory_mib=memory_mib + extra_mib).memory()
    assert layout.boot_mib + layout.requested_mib == memory_mib
    assert layout.requested_mib % 2 == 0
    assert layout.device_mib % 128 == 0
    assert layout.boot_mib + layout.device_mib >= memory_mib + extra_mib
    assert layout.boot_mib >= min(384, memory_mib)


def test_only_vcpu_0_cannot_be_unplugged_and_the_ceiling_is_declared() -> None:
    domain = rendered(cpu_cores=1.5, ceiling_cpu_cores=4)
    assert domain.findtext("./vcpu") == "4"
    found = [
        (vcpu.get("id"), vcpu.get("enabled"), vcpu.get("hotpluggable")) for vcpu in domain.iterfind("./vcpus/vcpu")
    ]
    assert found == [("0", "yes", "no"), ("1", "yes", "yes"), ("2", "no", "yes"), ("3", "no", "yes")]


def test_emulation_caps_its_translation_cache_and_kvm_has_none() -> None:
    assert rendered().findtext("./features/tcg/tb-cache") == "64"
    kvm = rendered(accelerator="kvm")
    assert kvm.find("./features/tcg") is None
    assert kvm.get("type") == "kvm"


def test_values_are_escaped_wherever_they_stand() -> None:
    disk = Path("/vms/<a> & 'b' \"c\".qcow2")
    domain = rendered(disk=disk, kernel=disk, kernel_arguments=("x=<&>",))
    source = domain.find("./devices/disk/source")
    assert source is not None
    assert source.get("file") == str(disk)
    assert domain.findtext("./os/kernel") == str(disk)
    assert (domain.findtext("./os/cmdline") or "").endswith("x=<&>")


def test_the_guest_has_its_three_channels_and_no_network() -> None:
    domain = rendered()
    names = {target.get("name") for target in domain.iterfind("./devices/channel/target")}
    assert names == {"org.qemu.guest_agent.0", "io.ebbtide.guest.0", "io.ebbtide.lab.0"}
    assert domain.find("./devices/interface") is None


def test_the_template_with_a_network_is_the_other_one_and_a_tap() -> None:
    domain = ElementTree.fromstring(render_domain(DomainTemplate.load("lab-net"), BASE))
    devices, interface = domain.find("./devices"), domain.find("./devices/interface")
    assert devices is not None
    assert interface is not None
    target = interface.find("target")
    assert target is not None
    assert (target.get("dev"), target.get("managed")) == (tap_name(BASE.name), "no")
    devices.remove(interface)
    assert ElementTree.canonicalize(ElementTree.tostring(domain), strip_text=True) == ElementTree.canonicalize(
        ElementTree.tostring(rendered()), strip_text=True
    )


@given(one=st.text(min_size=1), other=st.text(min_size=1))
def test_every_domain_has_a_tap_of_its_own_whose_name_the_kernel_takes(one: str, other: str) -> None:
    assert len(tap_name(one)) <= 15
    assert (tap_name(one) == tap_name(other)) == (one == other)


def test_metadata_is_one_element_with_a_namespace() -> None:
    domain = rendered(metadata="<e:intent xmlns:e='urn:x'>a &amp; b</e:intent>")
    assert domain.findtext("./metadata/{urn:x}intent") == "a & b"


@pytest.mark.parametrize("metadata", ["", "text", "<a/>", "<e:a xmlns:e='urn:x'/></metadata><devices/>", "<a/><b/>"])
def test_metadata_that_would_break_out_is_refused(metadata: str) -> None:
    with pytest.raises(TemplateError, match="metadata"):
        rendered(metadata=metadata)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "a b"}, "name"),
        ({"name": "../a"}, "name"),
        ({"uuid": "x"}, "uuid"),
        ({"cpu_cores": 0.0}, "cpu_cores"),
        ({"cpu_cores": float("nan")}, "cpu_cores"),
        ({"memory_mib": -1}, "memory_mib"),
        ({"ceiling_memory_mib": 1000}, "ceiling_memory_mib"),
        ({"ceiling_cpu_cores": 1.0}, "ceiling_cpu_cores"),
        ({"boot_memory_mib": 2048}, "boot_memory_mib"),
        ({"boot_memory_mib": 0}, "boot_memory_mib"),
        ({"accelerator": "xen"}, "accelerator"),
        ({"kernel_arguments": ("a b",)}, "kernel_arguments"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(TemplateError, match=field):
        rendered(**changes)


@pytest.mark.parametrize("name", ["", "../lab", "Lab", "lab.xml", "-lab", "lab/x", "lab\n"])
def test_a_template_name_cannot_leave_the_directory(name: str) -> None:
    with pytest.raises(TemplateError, match="may hold"):
        DomainTemplate.load(name)


def test_the_first_directory_that_has_the_template_wins(tmp_path: Path) -> None:
    for directory in ("host", "package"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "lab.xml").write_text(f"<domain type='{directory}'/>")
    assert DomainTemplate.load("lab", [tmp_path / "none", tmp_path / "host", tmp_path / "package"]).text == (
        "<domain type='host'/>"
    )


def test_an_unknown_template_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=str(tmp_path)):
        DomainTemplate.load("other", [tmp_path])


@pytest.mark.parametrize(("text", "reason"), [("<domain>$nonsense</domain>", "not known"), ("<domain>", "well-formed")])
def test_a_broken_template_is_refused(text: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        render_domain(DomainTemplate("broken", text), BASE)


def test_a_vm_of_dimms_has_its_pluggable_memory_in_whole_guest_blocks() -> None:
    parameters = dataclasses.replace(BASE, memory_mib=768, boot_memory_mib=512)
    domain = ElementTree.fromstring(render_domain(DomainTemplate.load("lab-dimm"), parameters))
    sizes = [size.text for size in domain.iterfind("./devices/memory[@model='dimm']/target/size")]
    assert sizes == ["128", "128"]
    assert domain.findtext("./memory") == "768"
    assert domain.find("./devices/memory[@model='virtio-mem']") is None


@pytest.mark.parametrize("changes", [{"boot_memory_mib": 500}, {"ceiling_memory_mib": 4096}])
def test_a_vm_of_dimms_that_does_not_come_out_even_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match="whole DIMMs of 128 MiB"):
        render_domain(DomainTemplate.load("lab-dimm"), dataclasses.replace(BASE, **changes))


@pytest.mark.parametrize(("initial_mib", "dimms"), [(1024, 4), (896, 3), (800, 2), (640, 1)])
def test_a_vm_of_dimms_that_starts_below_its_nominal_size_has_those_that_fit_and_room_for_the_others(
    initial_mib: int, dimms: int
) -> None:
    parameters = dataclasses.replace(BASE, boot_memory_mib=512, initial_memory_mib=initial_mib)
    domain = ElementTree.fromstring(render_domain(DomainTemplate.load("lab-dimm"), parameters))
    assert len(domain.findall("./devices/memory[@model='dimm']")) == dimms
    assert domain.findtext("./memory") == domain.findtext("./currentMemory") == str(512 + dimms * 128)
    assert domain.findtext("./maxMemory") == "1024"


def test_a_vm_of_dimms_does_not_start_without_one() -> None:
    parameters = dataclasses.replace(BASE, boot_memory_mib=512, initial_memory_mib=600)
    with pytest.raises(TemplateError, match=r"start_size\.memory_mib must be 640 at least"):
        render_domain(DomainTemplate.load("lab-dimm"), parameters)

"""Which domains of others can be looked after, by their XML."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from hostagent.libvirt.adopted import _why_not

VIRTIO = "<memory model='virtio-mem'/>"


@pytest.mark.parametrize("devices", ["", VIRTIO, f"{VIRTIO}<memory model='dimm'/><memory model='dimm'/>"])
def test_a_domain_whose_memory_is_known_can_be_adopted(devices: str) -> None:
    assert _why_not(_domain(devices), 2, 1024.0) == ""


def test_a_domain_with_two_virtio_mem_devices_is_refused_since_its_size_would_be_that_of_one() -> None:
    assert _why_not(_domain(VIRTIO * 2), 2, 1024.0).startswith("it has more than one virtio-mem device")


def _domain(devices: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<domain type='kvm'><devices>{devices}</devices></domain>")

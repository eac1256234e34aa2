"""What a lab has left in libvirt's folders is found also while libvirtd does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.lab.domains import domains_left


@pytest.mark.parametrize(
    ("folder", "name", "left"),
    [
        ("run", "ebb-host-a.low-1.pid", True),
        ("definitions", "ebb-host-a.low-1.xml", True),
        ("definitions", "ebb-host-z.low-1.xml", False),
        ("definitions", "networks.xml", False),
    ],
)
def test_a_process_or_a_definition_of_the_labs_hosts_is_left(
    tmp_path: Path, folder: str, name: str, left: bool
) -> None:
    for one in ("run", "definitions"):
        (tmp_path / one).mkdir()
    (tmp_path / folder / name).touch()
    assert domains_left(["host-a", "host-b"], tmp_path / "run", tmp_path / "definitions") is left

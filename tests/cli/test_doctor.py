"""What the doctor makes of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ebbtide.cli import doctor
from ebbtide.cli.doctor import Diagnosis, version_text
from ebbtide.cli.findings import Finding
from hostagent.limits.cgroups import cgroup_layout

V1 = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n"
V2 = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"


@pytest.mark.parametrize(
    ("mounts", "layout"), [(V1, "v1"), (V1 + V2, "hybrid"), (V2, "v2"), ("proc /proc proc rw 0 0\n", "none")]
)
def test_the_cgroup_layout_is_told_from_the_mounts(mounts: str, layout: str) -> None:
    assert cgroup_layout(mounts) == layout


def test_a_kernel_without_cpu_quotas_is_found_although_control_groups_are_mounted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "cgroup_layout", lambda text: "v2")
    monkeypatch.setattr(doctor, "own_mountinfo", lambda: "")
    found = doctor._cgroups({}, needed=True)
    assert (found.ok, found.detail) == (
        False,
        "no control group of this kernel limits CPU time, so no CPU can be throttled",
    )


def test_a_missing_part_that_is_not_needed_does_not_fail_the_machine() -> None:
    swap = Finding(name="swap", ok=False, needed=False, detail="none")
    qemu = Finding(name="qemu", ok=False, needed=True, detail="none", fix="apt-get install qemu-system-x86")
    assert Diagnosis([swap], {}).ok
    assert not Diagnosis([swap, qemu], {}).ok


def test_libvirts_version_number_is_written_as_its_makers_write_it() -> None:
    assert version_text(9_000_000) == "9.0.0"
    assert version_text(10_003_007) == "10.3.7"


def test_files_that_other_users_can_read_are_named_with_what_closes_them(tmp_path: Path) -> None:
    (tmp_path / "host-a").mkdir()
    for name in ("manager.sqlite", "manager.sqlite-wal", "host-a/state.json", "agent-token"):
        (tmp_path / name).touch(0o600)
    assert doctor._private(tmp_path).ok
    (tmp_path / "host-a/state.json").chmod(0o644)
    (tmp_path / "manager.sqlite-wal").chmod(0o640)
    found = doctor._private(tmp_path)
    assert (found.ok, found.fix) == (
        False,
        f"chmod go= {tmp_path}/host-a/state.json {tmp_path}/manager.sqlite-wal",
    )


def test_secrets_that_another_group_than_the_managers_can_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tls").mkdir()
    for name in ("token", "hosts.key", "tls/ca.key", "tls/ca.pem"):
        (tmp_path / name).touch(0o640)
    lstat = Path.lstat

    def of_group_7(path: Path) -> os.stat_result:
        found = list(lstat(path))
        found[5] = 7
        return os.stat_result(found)

    monkeypatch.setattr(Path, "lstat", of_group_7)
    assert doctor._secrets(tmp_path, 7).ok
    (tmp_path / "token").chmod(0o600)
    found = doctor._secrets(tmp_path, 8)
    assert (found.ok, found.needed, found.fix) == (
        False,
        False,
        f"chgrp ebbtide {tmp_path}/hosts.key {tmp_path}/tls/ca.key",
    )

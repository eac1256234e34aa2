"""Bursts of vCPUs under a quota: as large as the quota allows, none without one, never in the way of a quota."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostagent.limits import burst, cgroups
from hostagent.limits.cgroups import CgroupError, CpuGroup


@pytest.fixture(autouse=True)
def whole_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a control group is what was written to it last, however long it was before."""
    monkeypatch.setattr(cgroups, "write", lambda path, text: Path(path).write_text(text))


def group_of(path: Path, version: int, quota_us: int | None, burst_us: str | None = "0") -> CpuGroup:
    """A group of 100 ms periods. burst_us: None where the kernel has no bursts."""
    path.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (path / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} 100000\n")
    else:
        (path / "cpu.cfs_quota_us").write_text(f"{-1 if quota_us is None else quota_us}\n")
        (path / "cpu.cfs_period_us").write_text("100000\n")
    if burst_us is not None:
        (path / ("cpu.max.burst" if version == 2 else "cpu.cfs_burst_us")).write_text(burst_us)
    return CpuGroup(version, str(path))


@pytest.mark.parametrize("version", [1, 2])
def test_a_burst_is_a_share_of_the_quota_and_nothing_without_one(tmp_path: Path, version: int) -> None:
    limited, free = group_of(tmp_path / "a", version, 40_000), group_of(tmp_path / "b", version, None, "5")
    for group in (limited, free):
        group.set_burst(0.5)
    assert (limited.burst_us(), free.burst_us()) == (20_000, 0)
    limited.set_burst(0.0)
    assert limited.burst_us() == 0


def test_a_kernel_without_bursts_is_left_alone(tmp_path: Path) -> None:
    group = group_of(tmp_path, 1, 40_000, None)
    group.set_burst(0.5)
    assert group.burst_us() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu.cfs_period_us", "cpu.cfs_quota_us"]


def test_a_burst_that_does_not_read_as_it_was_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(tmp_path, 1, 40_000)
    monkeypatch.setattr(cgroups, "write", lambda path, text: None)
    with pytest.raises(CgroupError, match="is 0 instead of 20000"):
        group.set_burst(0.5)


@pytest.mark.parametrize("libvirts", [True, False])
def test_bursts_are_set_only_in_groups_that_libvirt_made_for_the_vcpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libvirts: bool
) -> None:
    domain, own = tmp_path / "machine" / "qemu-1-x", "vcpu0" if libvirts else "another"
    groups = {0: group_of(domain / own, 1, 30_000)}
    parent = group_of(domain, 1, 60_000)
    monkeypatch.setattr(burst, "qemu_pid", lambda domain, files: 4711)
    monkeypatch.setattr(cgroups, "vcpu_groups", lambda pid: groups)
    burst.give("x")
    assert (groups[0].burst_us(), parent.burst_us()) == ((15_000, 30_000) if libvirts else (0, 0))
    burst.drop("x")
    assert (groups[0].burst_us(), parent.burst_us()) == (0, 0)


def test_a_domain_that_does_not_run_is_no_error(tmp_path: Path) -> None:
    burst.give("nobody", tmp_path)
    burst.drop("nobody", tmp_path)


@pytest.mark.parametrize(("version", "has"), [(1, True), (1, False), (2, True), (2, False)])
def test_whether_the_kernel_has_bursts_is_read_from_the_groups_that_are_there(
    tmp_path: Path, version: int, has: bool
) -> None:
    kind = "cgroup" if version == 1 else "cgroup2"
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"25 1 0:22 / {tmp_path / 'cpu'} rw - {kind} {kind} rw,cpu\n")
    group_of(tmp_path / "cpu" / ("" if version == 1 else "machine.slice"), version, 1000, "0" if has else None)
    assert bool(burst.kernel_lacks_it(mountinfo)) is not has

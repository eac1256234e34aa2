"""The doctor holds a machine to what it is for: labs, a host, or a manager alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.cli import doctor
from ebbtide.cli.doctor import Diagnosis
from ebbtide.lab import services
from ebbtide.lab.cluster import DEFAULT_HOSTS
from ebbtide.rest.options import example_of
from hostagent.options import HostAgentOptions

ROOT = Path(__file__).parents[2]
EXAMPLE = example_of(HostAgentOptions)
LAB_ONLY = {"debootstrap", "busybox", "mke2fs", "dpkg-deb", "unshare"}
QEMU_AND_LIBVIRT = {"qemu-system-x86_64", "qemu-img", "libvirtd", "virtlogd"}


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any program."""
    monkeypatch.setattr(doctor, "SEARCH_PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(doctor, "DAEMONS", tmp_path / "daemons")
    monkeypatch.setenv("EBB_STATE_DIR", str(tmp_path / "lab"))
    monkeypatch.setenv("EBB_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def diagnosis(directory: Path, manager: str | None, agent: str | None) -> Diagnosis:
    files = {"manager.toml": manager, "hostagent.toml": agent}
    for name, text in files.items():
        if text is not None:
            (directory / name).write_text(text)
    return doctor.examine(manager=directory / "manager.toml", agent=directory / "hostagent.toml")


@pytest.mark.parametrize(
    ("manager", "agent", "said", "missing"),
    [
        (None, None, "no daemon has options in", LAB_ONLY | QEMU_AND_LIBVIRT),
        ("", None, "no host: ", set()),
        # As the package leaves both.
        ("", EXAMPLE, "no host: ", set()),
        ("", EXAMPLE.replace('id = "..."', 'id = "host-a"'), "a host, by ", QEMU_AND_LIBVIRT),
        # By the environment or the command line of its unit.
        (None, "", "a host, by ", QEMU_AND_LIBVIRT),
        (None, "no TOML", "a host, by ", QEMU_AND_LIBVIRT),
    ],
)
def test_what_a_machine_is_not_for_is_missed_as_a_note(
    bare: Path, manager: str | None, agent: str | None, said: str, missing: set[str]
) -> None:
    (bare / "bin").mkdir()
    (bare / "bin" / "apt-get").touch(0o755)
    found = diagnosis(bare, manager, agent)
    programs = {one.name: one for one in found.findings if one.name in LAB_ONLY | QEMU_AND_LIBVIRT}
    assert found.findings[0].detail.startswith(said)
    assert programs.keys() == LAB_ONLY | QEMU_AND_LIBVIRT
    assert {name for name, one in programs.items() if one.needed} == missing
    assert all(one.fix is not None and one.fix.startswith("apt-get install ") for one in programs.values())
    assert programs["debootstrap"].detail == "not installed; a lab needs it"
    assert all(name in found.problem for name in missing)


def test_a_manager_alone_misses_nothing(bare: Path) -> None:
    assert diagnosis(bare, "", EXAMPLE).problem == ""


def test_libvirts_modular_daemon_is_as_good_as_libvirtd(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "bin").mkdir()
    (bare / "bin" / "virtqemud").touch(0o755)
    monkeypatch.setattr(services.Service, "answers", lambda self: False)
    found = {one.name: one for one in diagnosis(bare, None, 'id = "host-a"').findings}
    assert (found["libvirtd"].ok, found["libvirtd"].detail) == (True, f"{bare}/bin/virtqemud")
    assert found["libvirt"].detail.endswith("systemctl start virtqemud.socket")


@pytest.mark.parametrize(("enabled", "unit"), [(0, "virtqemud.socket"), (1, "libvirtd")])
def test_of_two_daemons_of_libvirt_the_enabled_one_is_started(bare: Path, enabled: int, unit: str) -> None:
    (bare / "bin").mkdir()
    for name in ("virtqemud", "libvirtd"):
        (bare / "bin" / name).touch(0o755)
    assert services.libvirts_unit(str(bare / "bin")) == "libvirtd"
    systemctl = bare / "bin" / "systemctl"
    systemctl.write_text(f'#!/bin/sh\n[ "$*" = "is-enabled --quiet virtqemud.socket" ] && exit {enabled}\nexit 9\n')
    systemctl.chmod(0o755)
    assert services.libvirts_unit(str(bare / "bin")) == unit


def test_qemu_counts_by_the_name_that_other_distributions_give_it(bare: Path) -> None:
    (bare / "bin").mkdir()
    program = bare / "bin" / "qemu-kvm"
    program.write_text("#!/bin/sh\necho QEMU emulator version 9.1.0\n")
    program.chmod(0o755)
    found = {one.name: one for one in diagnosis(bare, None, 'id = "host-a"').findings}
    assert (found["qemu-system-x86_64"].ok, found["qemu-system-x86_64"].detail) == (True, str(program))
    assert (found["qemu"].ok, found["qemu"].detail) == (True, "9.1.0")


def test_a_system_without_apt_is_told_what_debians_packages_are_called(bare: Path) -> None:
    found = diagnosis(bare, None, 'id = "host-a"').findings
    fixes = [one.fix for one in found if one.fix is not None]
    assert "install what Debian's qemu-utils has" in fixes
    assert not any("apt-get" in fix for fix in fixes)


def test_files_of_the_daemons_that_other_users_can_read_are_found_without_a_lab(bare: Path) -> None:
    names = ("agent/state.json", "disks/ebb-a.x/disk.qcow2", "enrolment/host.key", "enrolment/report-token")
    for name in (*names, "manager/manager.sqlite-wal"):
        path = bare / "daemons" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.chmod(0o640)
    (found,) = (one for one in diagnosis(bare, None, 'id = "host-a"').findings if one.name == "private files")
    assert (found.ok, found.detail.split()[0]) == (False, "5")
    assert found.fix == "chmod go= " + " ".join(
        f"{bare}/daemons/{name}" for name in (*names, "manager/manager.sqlite-wal")
    )


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_what_the_demo_takes_is_the_same_in_the_doctor_and_in_words(page: str) -> None:
    assert f"{doctor.MEMORY_MIB / 1024:g} GiB of free memory" in (ROOT / page).read_text()
    # The demo's VMs are all on the larger host; manager, agents, libvirt and the command itself come on top.
    assert max(host.capacity.memory_mib for host in DEFAULT_HOSTS) + 400 <= doctor.MEMORY_MIB

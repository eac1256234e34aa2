"""libvirt of one lab host alone: its folders, what it is called from outside, and when it answers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ebbtide.lab import namespace, own_libvirt
from ebbtide.lab.errors import LabError
from ebbtide.lab.namespace import outside, uri_of
from ebbtide.lab.state import LabHost, LabState
from ebbtide.messages.common import Vector


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The machine's folders of libvirt."""
    folders = {name: tmp_path / "system" / name for name in namespace.FOLDERS}
    for path in (folders["etc"] / "qemu", folders["etc"] / "nwfilter", folders["cache"] / "qemu"):
        path.mkdir(parents=True)
    (folders["etc"] / "libvirtd.conf").write_text('#host_uuid = "old"\nhost_uuid = "old"\nmax_clients = 7\n')
    (folders["etc"] / "qemu.conf").write_text('user = "libvirt-qemu"\n')
    (folders["etc"] / "qemu" / "other.xml").write_text("<domain/>")
    (folders["cache"] / "qemu" / "capabilities.xml").write_text("<qemuCaps/>")
    monkeypatch.setattr(own_libvirt, "FOLDERS", folders)
    return folders


def host(name: str, home: Path | None) -> LabHost:
    path = Path("/none")
    return LabHost(
        id=name, capacity=Vector(cpu_cores=1.0), url="http://127.0.0.1:1", token_file=path, disk_dir=path, libvirt=home
    )


def test_two_hosts_have_the_machines_settings_an_identity_each_and_no_domain_of_the_machines(
    tmp_path: Path, system: dict[str, Path]
) -> None:
    texts = []
    for name in ("a", "b"):
        own_libvirt.make_folders(tmp_path / name)
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["cache", "etc", "lib", "log", "run"]
        assert not (tmp_path / name / "etc" / "qemu").exists()
        assert (tmp_path / name / "etc" / "qemu.conf").read_text() == 'user = "libvirt-qemu"\n'
        assert (tmp_path / name / "cache" / "qemu" / "capabilities.xml").exists()
        texts.append((tmp_path / name / "etc" / "libvirtd.conf").read_text())
    assert texts[0] != texts[1]
    for text in texts:
        assert "max_clients = 7" in text
        assert [line for line in text.splitlines() if line.startswith("host_uuid")] != ['host_uuid = "old"']
        assert text.count("\nhost_uuid = ") == 1


def test_a_directory_whose_socket_would_have_too_long_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="too long for a socket"):
        own_libvirt.make_folders(tmp_path / ("x" * 100))


def test_a_path_that_such_a_libvirt_says_is_found_in_the_hosts_folders(tmp_path: Path) -> None:
    uri, said = uri_of(tmp_path), Path("/var/lib/libvirt/qemu/channel/target/x")
    assert outside(uri, said) == tmp_path / "lib/qemu/channel/target/x"
    assert outside(uri, Path("/srv/disk")) == Path("/srv/disk")
    assert outside("qemu:///system", said) == said


def test_a_lab_says_where_each_hosts_libvirt_is(tmp_path: Path) -> None:
    state = LabState(hosts=[host("a", None), host("b", tmp_path)])
    assert state.uri_of("a") == "qemu:///system"
    assert state.uri_of("b") == f"qemu+unix:///system?socket={tmp_path}/run/libvirt-sock"
    with pytest.raises(LabError, match="no host of the lab is called c; there are a, b"):
        state.uri_of("c")


def test_libvirt_answers_when_that_of_every_host_does(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("a", "b")]
    state = LabState(hosts=[host(home.name, home) for home in homes])
    listeners = []
    for home in homes:
        assert not own_libvirt.answers(state)
        (home / "run").mkdir(parents=True)
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(str(home / "run" / namespace.SOCKET))
        listeners[-1].listen()
    assert own_libvirt.answers(state)
    for listener in listeners:
        listener.close()

"""The lab's file, its lock, its slices and its way down after a crash."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
import time
from pathlib import Path
from typing import Any

import libvirt
import pytest

from ebbtide.lab import cluster, domains, processes, services
from ebbtide.lab import state as lab_state
from ebbtide.lab.cluster import HostSlice, Lab
from ebbtide.lab.errors import LabError
from ebbtide.lab.state import (
    Daemon,
    LabHost,
    LabState,
    Process,
    StateFile,
    make_directory,
    make_open_directory,
    write_private,
)
from ebbtide.messages.common import Vector
from tests import libvirt_driver


def test_what_is_saved_is_loaded_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    state = LabState(phase="up", manager_url="http://127.0.0.1:1", services=[Process(name="dbus", pid=1, created=2.5)])
    file.save(state)
    assert file.load() == state
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["lab.json"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_all_users_pass_through_what_the_lab_makes_above_its_directories_whatever_the_umask(
    tmp_path: Path, umask: int
) -> None:
    os.umask(umask)  # set back after each test
    for make, mode in ((make_directory, 0o711), (make_open_directory, 0o755)):
        home = tmp_path / make.__name__
        make(home / "ebbtide" / "lab")
        found = [stat.S_IMODE(path.stat().st_mode) for path in (home, home / "ebbtide", home / "ebbtide" / "lab")]
        assert found == [0o755, 0o755, mode]


def test_a_file_that_is_no_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text("{}garbage")
    with pytest.raises(LabError, match=r"lab\.json is not the state of a lab"):
        StateFile(tmp_path).load()


def test_a_second_up_or_down_is_refused_while_one_is_at_work(tmp_path: Path) -> None:
    with (
        StateFile(tmp_path).lock(),
        pytest.raises(LabError, match="another `ebb lab` is at work"),
        StateFile(tmp_path).lock(),
    ):
        pass


def test_a_token_is_never_readable_by_others_not_even_when_it_replaces_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Host=cpu_cores=1,memory_mib=1", "host 'Host'"),
        ("a", "host a: '' is not COMPONENT=NUMBER"),
        ("a=cpu_cores=x,memory_mib=1", "'cpu_cores=x'"),
        ("a=cores=1,memory_mib=1", "cores is no component"),
        ("a=cpu_cores=-1,memory_mib=1", "cpu_cores must not be negative"),
        ("a=cpu_cores=nan,memory_mib=1", "cpu_cores must be finite"),
        ("a=cpu_cores=2", "host a: memory_mib must be given, and above 0"),
    ],
)
def test_a_slice_that_cannot_be_is_refused_with_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(LabError, match=words):
        HostSlice.parse(text)


def test_a_slice_is_read_from_its_words() -> None:
    parsed = HostSlice.parse("host-a=cpu_cores=6,memory_mib=3600")
    assert parsed == cluster.DEFAULT_HOSTS[0]


def test_free_ports_are_all_different() -> None:
    assert len(set(cluster.free_ports(20))) == 20


def test_a_stale_socket_file_does_not_count_as_a_running_service(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    service = services.Service("thing", (path,), ("thing",), "thing")
    assert not service.answers()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    assert service.answers()
    listener.close()
    assert path.exists()
    assert not service.answers()


def test_down_after_a_crash_stops_what_still_runs_and_leaves_nothing(tmp_path: Path) -> None:
    home = tmp_path / "lab"
    lab = Lab(home)
    for name in ("", "logs", "tokens", "manager"):
        (home / name).mkdir(exist_ok=True)
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    alive = processes.start("manager", sleeper, home / "logs" / "manager.log")
    gone = Process(name="host-a", pid=alive.pid, ticks=1, boot=alive.boot)
    log = home / "logs" / "x.log"
    daemons = [
        Daemon(name="manager", argv=sleeper, log=log, process=alive),
        Daemon(name="host-a", argv=sleeper, log=log, process=gone),
    ]
    lab.file.save(LabState(phase="up", daemons=daemons))
    assert lab.down()
    assert processes.running(alive) is None
    assert not home.exists()
    assert not lab.down()


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_down_goes_on_where_the_disk_is_full_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    lab = Lab(tmp_path / "lab", report=said.append)
    lab.directory.mkdir()
    lab.file.save(LabState(phase="up"))
    monkeypatch.setattr(lab_state, "write_private", no_room)
    assert lab.down()
    assert not lab.directory.exists()
    assert said == [
        f"{lab.file.path} cannot be written: No space left on device; going on all the same",
    ]


def test_a_start_on_a_full_disk_is_refused_with_a_sentence_and_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path / "lab")
    for place, name in ((lab_state, "write_private"), (Lab, "_prepare")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, no_room)
            with pytest.raises(LabError, match="No space left on device"):
                lab.up()
        assert not lab.directory.exists()


def test_down_leaves_files_that_the_lab_did_not_make(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    (tmp_path / "mine.txt").write_text("keep")
    lab.file.save(LabState(phase="up"))
    assert lab.down()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_up_of_a_lab_whose_libvirtd_is_gone_starts_that_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(services.Service, "answers", lambda service: bool(started))
    monkeypatch.setattr(services, "ensure_services", lambda *arguments: started.append("libvirtd"))
    monkeypatch.setattr(Lab, "wait_ready", lambda lab: started.append("waited for the hosts"))
    lab = Lab(tmp_path)
    lab.file.save(LabState(phase="up"))
    assert lab.status()["libvirtd"] is False
    lab.up()
    assert started == ["libvirtd", "waited for the hosts"]
    assert lab.status()["libvirtd"] is True


def test_up_of_a_lab_that_is_up_says_so_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services.Service, "answers", lambda service: True)
    sentences: list[str] = []
    lab = Lab(tmp_path, report=sentences.append)
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    alive = processes.start("manager", sleeper, tmp_path / "log")
    lab.file.save(
        LabState(phase="up", daemons=[Daemon(name="manager", argv=sleeper, log=tmp_path / "log", process=alive)])
    )
    assert lab.up().daemons[0].process == alive
    assert sentences == [f"the lab is already up in {tmp_path}"]
    with pytest.raises(LabError, match="a lab with other hosts is up"):
        lab.up([HostSlice("host-z", Vector(cpu_cores=1, memory_mib=512).vector())])
    processes.stop([alive])


def test_a_lab_whose_hosts_share_a_libvirt_gives_none_of_their_own_when_asked_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    size = Vector(cpu_cores=1, memory_mib=512)
    host = LabHost(id="host-a", capacity=size, url="http://127.0.0.1:1", token_file=tmp_path, disk_dir=tmp_path)
    lab.file.save(LabState(phase="up", hosts=[host]))
    with pytest.raises(LabError, match="share one libvirt; take it down first"):
        lab.up(own_libvirt=True)


def test_only_logs_of_our_own_domains_are_removed(tmp_path: Path) -> None:
    for name in ("ebb-host-a.low-1.log", "ebb-host-a.low-1.log.0", "ebb-host-b.x.log", "other.log", "ebb-host-a.x.txt"):
        (tmp_path / name).touch()
    domains.remove_logs(["host-a"], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ebb-host-a.x.txt", "ebb-host-b.x.log", "other.log"]


def test_a_pid_file_of_our_domains_means_that_some_may_be_left(tmp_path: Path) -> None:
    (tmp_path / "other.pid").touch()
    assert not domains.domains_left(["host-a"], tmp_path)
    (tmp_path / "ebb-host-a.low-1.pid").touch()
    assert domains.domains_left(["host-a"], tmp_path)


def test_a_service_that_has_ended_is_told_of_with_how_and_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "LIBVIRTD", services.Service("libvirtd", (), ("true",), "none"))
    monkeypatch.setattr(services.Service, "answers", lambda self: True)
    crash = [sys.executable, "-c", "import os; print('out of luck', flush=True); os.abort()"]
    ended = processes.start("libvirtd", crash, tmp_path / "libvirtd.log")
    deadline_s = time.monotonic() + 20
    while processes.running(ended) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    state, said = LabState(services=[ended]), list[str]()
    services.ensure_services(state, tmp_path, lambda: None, said.append)
    assert state.services == []
    assert "was ended by SIGABRT" in said[0]
    assert "out of luck" in said[0]


class Hangs:
    """A connection whose libvirtd ends in the middle of the first removal."""

    calls = 0

    def __init__(self, left: list[str]) -> None:
        self._left = left

    def listAllDomains(self) -> list[Any]:
        return [Removable(self._left, name) for name in self._left]

    def lookupByUUIDString(self, name: str) -> Any:
        if name not in self._left:
            raise failed(libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_FROM_QEMU, "no domain")
        return Removable(self._left, name)

    def close(self) -> None:
        pass


class Removable:
    def __init__(self, left: list[str], name: str) -> None:
        self._left, self._name = left, name

    def name(self) -> str:
        return self._name

    UUIDString = name

    def isActive(self) -> bool:
        return True

    def isPersistent(self) -> bool:
        return False

    def destroy(self) -> None:
        Hangs.calls += 1
        if Hangs.calls == 2:
            raise failed(libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_FROM_RPC, "End of file while reading data")
        self._left.remove(self._name)


def failed(code: int, domain: int, message: str) -> libvirt.libvirtError:
    error = libvirt.libvirtError(message)
    error.err = (code, domain, message, 2, None, None, None, -1, -1)
    return error


def test_domains_are_removed_though_libvirtd_ends_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    left = ["ebb-h.a", "ebb-h.b", "ebb-h.c"]
    monkeypatch.setattr(Hangs, "calls", 0)
    monkeypatch.setattr(domains, "open_libvirt", lambda uri: Hangs(left))
    monkeypatch.setattr(domains, "_owner", lambda domain: "h")
    said, revived = list[str](), list[int]()
    removed = domains.remove_domains("qemu:///system", ["h"], said.append, lambda: revived.append(1))
    assert (removed, left, revived) == (["ebb-h.a", "ebb-h.b", "ebb-h.c"], [], [1])
    assert [sentence for sentence in said if "End of file while reading data" in sentence]


def test_a_domain_with_a_saved_image_is_removed_too() -> None:
    connection = libvirt_driver.opened()
    domain = connection.lookupByName("test")
    domain.managedSave()
    with pytest.raises(libvirt.libvirtError, match="managed save"):
        domain.undefine()
    domains._remove(connection, domain.UUIDString(), "test")
    assert connection.listAllDomains() == []
    connection.close()


def test_domains_are_not_said_to_be_removed_where_nobody_brings_libvirtd_back(monkeypatch: pytest.MonkeyPatch) -> None:
    left = ["ebb-h.a", "ebb-h.b"]
    monkeypatch.setattr(Hangs, "calls", 1)
    monkeypatch.setattr(domains, "open_libvirt", lambda uri: Hangs(left))
    monkeypatch.setattr(domains, "_owner", lambda domain: "h")
    with pytest.raises(LabError, match="End of file while reading data"):
        domains.remove_domains("qemu:///system", ["h"], lambda sentence: None)


def test_a_link_that_waits_where_a_private_file_is_written_is_not_followed(tmp_path: Path) -> None:
    """`ebb host tokens` writes into any directory, also one where others may make files."""
    (tmp_path / "other").write_text("another's")
    (tmp_path / f".token.{os.getpid()}").symlink_to(tmp_path / "other")
    write_private(tmp_path / "token", "secret")
    assert (tmp_path / "token").read_text() == "secret"
    assert (tmp_path / "other").read_text() == "another's"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".token.{os.getpid()}", "other", "token"]

"""A lab takes no domain of another host for its own, and no directory of others."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import libvirt
import pytest

from cluster_manager.options import ManagerOptions
from ebbtide.lab import cluster, domains, own_libvirt, processes, services
from ebbtide.lab.cluster import HostSlice, Lab
from ebbtide.lab.errors import LabError
from ebbtide.lab.image import Image
from ebbtide.lab.state import Daemon, LabHost, LabState
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from ebbtide.rest.options import read_options
from hostagent.options import HostAgentOptions
from hostagent.state import intents
from hostagent.state.intents import Before, Intent, Phase
from tests import libvirt_driver

SIZE = Vector(cpu_cores=1, memory_mib=512)
DOMAIN = "<domain type='test'><name>{}</name><memory>1024</memory><os><type>hvm</type></os></domain>"
#: Where `up` goes on once nothing of others is in its way.
WENT_ON = "there is no image"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The machine's libvirt, with one domain that is nobody's; guest images cannot be built on it."""

    def no_image(*_: Any, **__: Any) -> None:
        raise LabError(WENT_ON)

    connection = libvirt_driver.opened()
    monkeypatch.setattr(domains, "open_libvirt", lambda uri: libvirt.open("test:///default"))
    # A lab that runs on the machine keeps its own.
    monkeypatch.setattr(domains, "remove_logs", lambda hosts: None)
    monkeypatch.setattr(services, "ensure_services", lambda *arguments: None)
    monkeypatch.setattr(services.Service, "answers", lambda service: True)
    monkeypatch.setattr(cluster, "build_image", no_image)
    yield connection
    connection.close()


def define(connection: Any, name: str, owner: str | None = None, adopted: bool = False) -> None:
    domain = connection.defineXML(DOMAIN.format(name))
    if owner is not None:
        intent = Intent(
            owner=owner,
            spec=VMSpec(name="web", nominal=SIZE),
            boot_mib=384,
            phase=Phase.STOPPED,
            target=SIZE,
            committed=SIZE,
            adopted=Before() if adopted else None,
        )
        domain.setMetadata(
            libvirt.VIR_DOMAIN_METADATA_ELEMENT,
            intents.to_element(intent, domain.UUIDString()),
            intents.PREFIX,
            intents.NAMESPACE,
            libvirt.VIR_DOMAIN_AFFECT_CONFIG,
        )


def names_of(connection: Any) -> list[str]:
    return sorted(domain.name() for domain in connection.listAllDomains())


def slices(*ids: str) -> list[HostSlice]:
    return [HostSlice(name, SIZE.vector()) for name in ids]


@pytest.mark.parametrize(
    ("name", "owner"), [("ebb-host-a.web", "host-a"), ("adopted", "host-a"), ("ebb-host-a.x", None)]
)
def test_a_lab_is_refused_where_libvirt_has_domains_that_it_would_take_for_its_own_and_leaves_them(
    tmp_path: Path, machine: Any, name: str, owner: str | None
) -> None:
    define(machine, name, owner)
    before = names_of(machine)
    with pytest.raises(LabError, match=rf"already .*: {name}; choose other ids than host-a, host-b: `ebb"):
        Lab(tmp_path / "lab").up()
    assert names_of(machine) == before
    assert not (tmp_path / "lab").exists()
    with pytest.raises(LabError, match=WENT_ON):
        Lab(tmp_path / "lab").up(slices("host-c"))
    assert names_of(machine) == before


def test_a_host_with_a_libvirt_of_its_own_meets_no_domain_of_the_machine(tmp_path: Path, machine: Any) -> None:
    define(machine, "ebb-host-a.web", "host-a")
    with pytest.raises(LabError, match=WENT_ON):
        Lab(tmp_path / "lab").up(own_libvirt=True)
    assert "ebb-host-a.web" in names_of(machine)


def test_a_lab_with_libvirts_of_its_own_leaves_the_logs_of_the_machines(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[list[str]] = []
    monkeypatch.setattr(domains, "remove_logs", lambda hosts: removed.append(list(hosts)))
    monkeypatch.setattr(domains, "remove_domains", lambda *arguments: [])
    monkeypatch.setattr(own_libvirt, "answers", lambda state: True)
    for home, logs in ((tmp_path / "libvirt", []), (None, [["host-a"]])):
        host = LabHost(id="host-a", capacity=SIZE, url="http://x", token_file=tmp_path, disk_dir=tmp_path, libvirt=home)
        lab = Lab(tmp_path / "lab")
        lab.directory.mkdir()
        lab.file.save(LabState(phase="up", hosts=[host]))
        assert lab.down()
        assert removed == logs


def test_a_lab_that_was_killed_is_brought_up_again_over_what_it_has_left(tmp_path: Path, machine: Any) -> None:
    define(machine, "ebb-left-behind.web", "left-behind")
    lab = Lab(tmp_path / "lab")
    lab.directory.mkdir()
    host = LabHost(id="left-behind", capacity=SIZE, url="http://x", token_file=tmp_path, disk_dir=tmp_path)
    lab.file.save(LabState(phase="starting", hosts=[host]))
    with pytest.raises(LabError, match=WENT_ON):
        lab.up(slices("left-behind"))
    assert "ebb-left-behind.web" not in names_of(machine)


def lab_that_is_up(home: Path, phase: Literal["up", "starting", "stopping"] = "up") -> Lab:
    lab = Lab(home)
    lab.directory.mkdir()
    host = LabHost(id="host-a", capacity=SIZE, url="http://x", token_file=home, disk_dir=home)
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    daemon = Daemon(name="manager", argv=sleeper, log=home.parent / "log")
    daemon.process = processes.start("manager", sleeper, daemon.log)
    lab.file.save(LabState(phase=phase, hosts=[host], daemons=[daemon]))
    return lab


REFUSED = (
    r"web \(domain debian12\) was adopted by this lab, which stays: .*; release it first: `ebb vm release web --yes`"
)


@pytest.mark.parametrize("phase", ["up", "starting", "stopping"])
def test_a_lab_that_has_adopted_a_domain_is_neither_taken_down_nor_cleared_away_before_its_release(
    tmp_path: Path, machine: Any, phase: Literal["up", "starting", "stopping"]
) -> None:
    define(machine, "debian12", "host-a", adopted=True)
    lab = lab_that_is_up(tmp_path / "lab", phase)
    (process,) = [daemon.process for daemon in lab.state().daemons]
    with pytest.raises(LabError, match=REFUSED):
        lab.down() if phase == "up" else lab.up()
    assert processes.running(process)
    # Its daemons can be started again: a release needs them.
    assert lab.state().phase == "up"
    machine.lookupByName("debian12").undefine()
    assert lab.down()
    assert not lab.directory.exists()
    assert not processes.running(process)


@pytest.mark.parametrize("adopted", [False, True])
def test_a_copy_of_a_domain_of_the_lab_is_not_adopted_and_keeps_no_lab(
    tmp_path: Path, machine: Any, adopted: bool
) -> None:
    define(machine, "a-copy", "host-a", adopted)
    lab = lab_that_is_up(tmp_path / "lab")
    (state := tmp_path / "lab" / "hosts" / "host-a" / "state").mkdir(parents=True)
    (state / "adopted.json").write_text("[]")
    assert lab.down()
    assert "a-copy" in names_of(machine)


def test_a_domain_that_is_adopted_while_the_daemons_are_stopped_keeps_the_lab(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = lab_that_is_up(tmp_path / "lab")
    stop = processes.stop

    def late(ours: Any) -> list[str]:
        define(machine, "debian12", "host-a", adopted=True)
        return stop(ours)

    monkeypatch.setattr(processes, "stop", late)
    with pytest.raises(LabError, match=REFUSED):
        lab.down()
    assert lab.state().phase == "up"


def test_libvirt_is_started_for_a_look_where_an_agent_has_noted_adopted_domains(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    define(machine, "debian12", "host-a", adopted=True)
    lab, started = lab_that_is_up(tmp_path / "lab"), list[str]()
    monkeypatch.setattr(services.Service, "answers", lambda service: bool(started))
    monkeypatch.setattr(services, "ensure_services", lambda *arguments: started.append("libvirtd"))
    (state := tmp_path / "lab" / "hosts" / "host-a" / "state").mkdir(parents=True)
    (state / "adopted.json").write_text('["debian12"]')
    with pytest.raises(LabError, match=REFUSED):
        lab.down()
    processes.stop([daemon.process for daemon in lab.state().daemons if daemon.process is not None])


def test_a_directory_of_others_is_refused_and_stays_as_it_is(tmp_path: Path, machine: Any) -> None:
    tmp_path.chmod(0o750)
    for name in ("hosts", "logs", "tokens"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    lab = Lab(tmp_path)
    begins: tuple[Callable[[], LabState], ...] = (lab.up, lambda: lab.prepare(slices("host-a")))
    for begin in begins:
        with pytest.raises(LabError, match=r"not empty \(hosts is there\): have EBB_STATE_DIR name"):
            begin()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts", "logs", "tokens"]
    assert all((tmp_path / name / "mine").exists() for name in ("hosts", "logs", "tokens"))


def test_what_a_lab_leaves_that_is_killed_before_it_has_a_file_is_in_no_labs_way(tmp_path: Path, machine: Any) -> None:
    for name in ("lock", ".lab.json.x7"):
        (tmp_path / name).touch()
    with pytest.raises(LabError, match=WENT_ON):
        Lab(tmp_path).up()


def test_a_lab_takes_no_option_of_the_machines_own_daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a production host a lab had its TLS, its port of metrics and its engine, which submits to its Slurm."""
    of_machine = tmp_path / "options.toml"
    of_machine.write_text("metrics_port = 7190\n")
    for model in (ManagerOptions, HostAgentOptions):
        monkeypatch.setattr(model, "file", of_machine)
        monkeypatch.setenv(f"{model.model_config['env_prefix']}CONFIG", str(of_machine))
    # What the caller says by other variables is for the lab (docs/reference/tracing.md).
    monkeypatch.setenv("EBB_MANAGER_TRACING", "true")
    lab, state = Lab(tmp_path / "lab"), LabState(accelerator="qemu")
    lab.directory.mkdir()
    image = Image("key", tmp_path / "base", tmp_path / "kernel", tmp_path / "initrd", 1.0)
    lab._describe(state, image, tuple(slices("x")), False)
    manager, agent = (daemon.argv[1:] for daemon in state.daemons)
    seen = read_options(ManagerOptions, manager, "", ""), read_options(HostAgentOptions, agent, "", "")
    assert [given.options.metrics_port for given in seen] == [None, None]
    assert seen[0].options.tracing

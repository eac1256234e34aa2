"""State of a lab between `ebb lab up` and `ebb lab down`: one file, written whole after every step."""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ebbtide.files import replacing
from ebbtide.lab.errors import LabError
from ebbtide.lab.kvm_device import DeviceAccess
from ebbtide.lab.namespace import uri_of
from ebbtide.lab.paths import STATE_VARIABLE
from ebbtide.messages.common import Name, Vector
from hostagent.state.files import make_parents

FILE = "lab.json"
LOCK = "lock"


class Process(BaseModel):
    """A process that the lab started; by when it began, a reused pid is never taken for it."""

    model_config = ConfigDict(frozen=True)

    name: str
    pid: int
    #: The kernel's ticks from its boot to the start of the process: no step of the clock moves them.
    ticks: int | None = None
    boot: str = ""
    #: In files of 0.1 in the place of both: seconds of the clock.
    created: float | None = None


class Daemon(BaseModel):
    """One of our daemons: how it is started, and the process while it runs."""

    name: str
    argv: list[str]
    log: Path
    process: Process | None = None


class LabHost(BaseModel):
    """One host of the lab: a declared slice of this machine with an agent of its own."""

    model_config = ConfigDict(frozen=True)

    id: Name
    capacity: Vector
    url: str
    token_file: Path
    disk_dir: Path
    #: The folders of a libvirt of its own; None: it shares the machine's with the other hosts.
    libvirt: Path | None = None

    @property
    def uri(self) -> str:
        """Its libvirt, for who is not in its namespace."""
        return "qemu:///system" if self.libvirt is None else uri_of(self.libvirt)


class LabState(BaseModel):
    """The lab as it stands in its file."""

    version: Literal[1] = 1
    phase: Literal["starting", "up", "stopping"] = "starting"
    manager_url: str = ""
    manager_token_file: Path = Path()
    uri: str = "qemu:///system"
    accelerator: str = ""
    accelerator_reason: str = ""
    image: str = ""
    hosts: list[LabHost] = []
    daemons: list[Daemon] = []
    #: Services of the system that ran nowhere before; in the order in which they were started.
    services: list[Process] = []
    #: Whether the bridge of libvirt's default network was there before we first started libvirtd, which brings it up;
    #: None: not known.
    bridge_was_there: bool | None = None
    #: In files of earlier versions in its place: the network came up with that libvirtd.
    network_started: bool = False
    #: Who could open /dev/kvm before the lab opened it to libvirt's QEMU user; None if nothing was changed.
    kvm_before: DeviceAccess | None = None

    @property
    def processes(self) -> list[Process]:
        """All that the lab has started, whether it still runs or not."""
        return [*self.services, *(daemon.process for daemon in self.daemons if daemon.process is not None)]

    def uri_of(self, host_id: str) -> str:
        """The libvirt of one of its hosts. Raises LabError for a name that no host has."""
        for host in self.hosts:
            if host.id == host_id:
                return host.uri
        raise LabError(f"no host of the lab is called {host_id}; there are {', '.join(h.id for h in self.hosts)}")

    def daemon(self, name: str) -> Daemon:
        """Raises LabError for a name that no daemon has."""
        for daemon in self.daemons:
            if daemon.name == name:
                return daemon
        raise LabError(f"no daemon of the lab is called {name}; there are {', '.join(d.name for d in self.daemons)}")


class StateFile:
    """The file of a lab in its directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / FILE

    def load(self) -> LabState | None:
        """None where no lab was started. Raises LabError for a file that cannot be understood."""
        try:
            return LabState.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise LabError(f"{self.path} may be read by root only") from error
        except ValidationError as error:
            raise LabError(f"{self.path} is not the state of a lab: {error}") from error

    def running(self) -> LabState:
        """Raises LabError if no lab is up here."""
        state = self.load()
        if state is None:
            raise LabError(f"no lab is up in {self.directory}; start one with `ebb lab up`")
        return state

    def save(self, state: LabState) -> None:
        """Write it whole or not at all. Raises LabError where it cannot be written."""
        try:
            write_private(self.path, state.model_dump_json(indent=1) + "\n")
        except OSError as error:
            raise LabError(f"{self.path} cannot be written: {error.strerror}") from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One `up` or `down` at a time. Raises LabError while another one is at work, and in a directory of others.

        What the system refuses meanwhile, say on a full disk, becomes a LabError.
        """
        self._refuse_others_directory()
        try:
            make_directory(self.directory)
            with (self.directory / LOCK).open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise LabError(f"another `ebb lab` is at work in {self.directory}") from error
                yield
        except OSError as error:
            raise LabError(f"the lab in {self.directory} cannot go on: {error}") from error

    def _refuse_others_directory(self) -> None:
        """Files without a lab's are not ours: `down` would remove them.

        A lab that was killed before it was described has left its lock, and perhaps the beginning of its file.
        """
        try:
            names = sorted(path.name for path in self.directory.iterdir())
        except OSError:
            return  # it is not there, or make_directory says what is wrong with it
        others = [name for name in names if name != LOCK and not name.startswith(f".{FILE}.")]
        if others and FILE not in names:
            raise LabError(
                f"{self.directory} is no lab's, and not empty ({others[0]} is there): have {STATE_VARIABLE} name an "
                "empty directory, or one that is not there yet"
            )


def make_directory(path: Path) -> None:
    """A directory that QEMU's user may pass through but not list, whatever the umask."""
    try:
        make_parents(path, 0o755)
        path.mkdir(exist_ok=True)
        path.chmod(0o711)
    except PermissionError as error:
        raise LabError(f"{path} cannot be made: the lab needs root, or another {path.parent}") from error
    except OSError as error:
        raise LabError(f"{path} cannot be made: {error.strerror}") from error


def make_open_directory(path: Path) -> None:
    """A directory, if there is none, that all users may pass through and list, whatever the umask."""
    if not path.exists():
        make_parents(path, 0o755)
        path.mkdir(exist_ok=True)
        path.chmod(0o755)


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only its owner can read."""
    with replacing(path) as file:
        file.write(text.encode())


def new_token() -> str:
    """A random bearer token."""
    return secrets.token_urlsafe(32)

"""`ebb lab up`, `down` and `status`: one manager and its host agents as child processes on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ebbtide.client import ManagerClient
from ebbtide.deflation.resources import ResourceVector
from ebbtide.errors import EbbError
from ebbtide.lab import domains, own_libvirt, paths, processes, services
from ebbtide.lab.errors import LabError
from ebbtide.lab.image import Image, build_image
from ebbtide.lab.namespace import inside, outside, uri_of
from ebbtide.lab.state import LOCK, Daemon, LabHost, LabState, StateFile, make_directory, new_token, write_private
from ebbtide.messages.common import Name, Vector
from ebbtide.messages.hosts import HostStatus, capacity_of
from ebbtide.rest.credentials import command_token, report_token
from ebbtide.rest.tokens import read_token
from hostagent.mechanisms.accelerator import Accelerator, probe_accelerator

Report = Callable[[str], None]

LOOPBACK = "127.0.0.1"
READY_S = 60.0
MANAGER = "manager"
#: All that a lab makes in its directory.
CONTENTS = ("hosts", "logs", "manager", "tokens", "lab.json")


@dataclass(frozen=True)
class HostSlice:
    """A declared part of this machine: what one host agent may hand out."""

    id: str
    capacity: ResourceVector

    @classmethod
    def parse(cls, text: str) -> HostSlice:
        """Read ``host-a=cpu_cores=6,memory_mib=3600``. Raises LabError that names what is wrong."""
        name, _, rest = text.partition("=")
        try:
            TypeAdapter(Name).validate_python(name)
        except ValidationError as error:
            raise LabError(f"host {name!r} may hold 1 to 40 lower-case letters, digits and hyphens") from error
        try:
            return cls(name, capacity_of(rest))
        except ValueError as error:
            raise LabError(f"host {name}: {error}") from error


DEFAULT_HOSTS = (
    HostSlice("host-a", ResourceVector(cpu_cores=6, memory_mib=3600)),
    HostSlice("host-b", ResourceVector(cpu_cores=2, memory_mib=1600)),
)


class Lab:
    """The lab in one directory. Its methods block; progress goes to ``report``, a sentence a step."""

    def __init__(self, directory: Path | None = None, report: Report = lambda sentence: None) -> None:
        self.directory = directory or paths.state_dir()
        self.report = report
        self.file = StateFile(self.directory)

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    def state(self) -> LabState:
        """Raises LabError if no lab is up here."""
        return self.file.running()

    def up(self, hosts: Sequence[HostSlice] | None = None, own_libvirt: bool = False) -> LabState:
        """Start the lab, or what of it does not run any more. Undone if it fails. Raises LabError.

        :param own_libvirt: whether each host gets a libvirt of its own instead of the machine's.
        """
        with self.file.lock():
            state = self.file.load()
            if state is not None and state.phase != "up":
                self.report("clearing away what an unfinished start or stop left behind")
                self._clear(state)
                state = None
            if state is not None:
                return self._resume(state, hosts, own_libvirt)
            state = LabState()
            try:
                self._start(state, tuple(hosts or DEFAULT_HOSTS), own_libvirt)
            except BaseException as error:
                self.report(f"undoing the start: {error or type(error).__name__}")
                # The file may not know yet what was started last.
                self._clear(state)
                raise
            return state

    def prepare(self, hosts: Sequence[HostSlice]) -> LabState:
        """What `up` does before it starts the daemons: for host agents that run in the caller's own process.

        Raises LabError, also where a lab is up here; `down` clears away what was made.
        """
        with self.file.lock():
            if self.file.load() is not None:
                raise LabError(f"there is a lab in {self.directory} already")
            state = LabState()
            self._prepare(state, tuple(hosts))
            return state

    def down(self) -> bool:
        """Remove all that the lab made, but the image cache; also after a crash. Returns whether there was anything.

        Raises LabError, also while it has adopted VMs: then all is left as it is.
        """
        if not self.file.path.exists():
            return False
        with self.file.lock():
            state = self.file.load()
            if state is None:
                return False
            self._clear(state)
        return True

    def status(self) -> dict[str, Any]:
        """What runs, as data. Raises LabError if no lab is up here."""
        state = self.state()
        seen = {host.id: host for host in self._hosts_seen(state)}
        return {
            "state_dir": str(self.directory),
            "phase": state.phase,
            "accelerator": state.accelerator,
            "accelerator_reason": state.accelerator_reason,
            "image": state.image,
            "manager": state.manager_url,
            "token_file": str(state.manager_token_file),
            "daemons": [
                {
                    "name": daemon.name,
                    "pid": daemon.process.pid if daemon.process else None,
                    "running": processes.running(daemon.process) is not None,
                    "log": str(daemon.log),
                }
                for daemon in state.daemons
            ],
            "services_started": [process.name for process in state.services],
            "libvirtd": own_libvirt.answers(state),
            "hosts": [
                {
                    "id": host.id,
                    "state": seen[host.id].state if host.id in seen else "unknown",
                    "capacity": host.capacity.vector().as_dict(),
                    "vms": list(seen[host.id].vms) if host.id in seen else [],
                }
                for host in state.hosts
            ],
        }

    def start_daemon(self, name: str) -> None:
        """Start one daemon again that has ended. Raises LabError if it runs or cannot be started."""
        state = self.state()
        daemon = state.daemon(name)
        if processes.running(daemon.process):
            raise LabError(f"{name} runs already")
        with self._noting(state):
            daemon.process = processes.start(name, daemon.argv, daemon.log)
            self.file.save(state)

    def wait_ready(self, limit_s: float = READY_S) -> None:
        """Until the manager sees every host ready. Raises LabError with the log of a daemon that ended."""
        state = self.state()
        deadline_s = time.monotonic() + limit_s
        while True:
            for daemon in state.daemons:
                if processes.running(daemon.process) is None:
                    raise LabError(f"{daemon.name} ended; the end of {daemon.log}:\n{processes.tail(daemon.log)}")
            ready = {host.id for host in self._hosts_seen(state) if host.state in ("ready", "overcommitted")}
            missing = [host.id for host in state.hosts if host.id not in ready]
            if not missing:
                return
            if time.monotonic() > deadline_s:
                raise LabError(f"the manager has not heard of {', '.join(missing)} within {limit_s:g} s")
            time.sleep(0.2)

    # --- up ------------------------------------------------------------------------------------------------------

    def _prepare(self, state: LabState, hosts: tuple[HostSlice, ...], own: bool = False) -> None:
        names = [host.id for host in hosts]
        if len(set(names)) != len(names):
            raise LabError(f"two hosts have the same name: {', '.join(names)}")
        # First of all: a directory with files and without this one is another's (`StateFile.lock`).
        self._save(state)
        make_directory(self.logs)
        if not own:
            self._ensure_libvirt(state)
            if found := domains.domains_of(state.uri, names):
                raise LabError(
                    f"libvirt has domains already that this lab would take for its own: {', '.join(found)}; choose "
                    f"other ids than {', '.join(names)}: `ebb lab up --host ID=cpu_cores=N,memory_mib=N`"
                )
        image = build_image(paths.image_cache(), progress=lambda stage, done: self.report(f"guest image: {stage}"))
        accelerator = self._probe(image)
        state.image, state.accelerator, state.accelerator_reason = image.key, accelerator.kind, accelerator.reason
        self._describe(state, image, hosts, own)
        self._save(state)
        if own:
            self._ensure_libvirt(state)

    def _ensure_libvirt(self, state: LabState, save: Callable[[LabState], None] | None = None) -> None:
        ensure = own_libvirt.ensure_own if any(host.libvirt for host in state.hosts) else services.ensure_services
        ensure(state, self.logs, lambda: (save or self._save)(state), self.report)

    def _start(self, state: LabState, hosts: tuple[HostSlice, ...], own: bool) -> None:
        self._prepare(state, hosts, own)
        for daemon in state.daemons:
            self.report(f"starting {daemon.name}")
            daemon.process = processes.start(daemon.name, daemon.argv, daemon.log)
            self._save(state)
        self.report("waiting for the hosts to report")
        self.wait_ready()
        state.phase = "up"
        self._save(state)

    def _resume(self, state: LabState, hosts: Sequence[HostSlice] | None, own: bool) -> LabState:
        wanted = {(host.id, host.capacity) for host in hosts or ()}
        if wanted and wanted != {(host.id, host.capacity.vector()) for host in state.hosts}:
            raise LabError("a lab with other hosts is up; take it down first with `ebb lab down`")
        if own and not all(host.libvirt for host in state.hosts):
            raise LabError("a lab is up whose hosts share one libvirt; take it down first with `ebb lab down`")
        ended = [daemon for daemon in state.daemons if processes.running(daemon.process) is None]
        if not ended and own_libvirt.answers(state):
            self.report(f"the lab is already up in {self.directory}")
            return state
        with self._noting(state):
            self._ensure_libvirt(state)
            for daemon in ended:
                self.report(f"{daemon.name} had ended; starting it again")
                daemon.process = processes.start(daemon.name, daemon.argv, daemon.log)
                self._save(state)
        self.wait_ready()
        return state

    @contextmanager
    def _noting(self, state: LabState) -> Iterator[None]:
        """Where it breaks off: what was started, and the file does not know, is stopped again.

        Beside it the next `up` could start no other, and no `down` would end it.
        """
        try:
            yield
        except BaseException:
            noted = (self.file.load() or LabState()).processes
            processes.stop([process for process in state.processes if process not in noted])
            raise

    def _probe(self, image: Image) -> Accelerator:
        self.report("probing the accelerator")
        return probe_accelerator(image.kernel, None, paths.accelerator_cache())

    def _describe(self, state: LabState, image: Image, hosts: tuple[HostSlice, ...], own: bool) -> None:
        """Fill in ports, tokens and command lines."""
        tokens, manager_dir = self.directory / "tokens", self.directory / "manager"
        make_directory(tokens)
        make_directory(manager_dir)
        manager_port, *agent_ports = free_ports(1 + len(hosts))
        state.manager_url = f"http://{LOOPBACK}:{manager_port}"
        state.manager_token_file = self._token(tokens / "manager")
        key_file = self._token(tokens / "hosts.key")
        key = read_token(key_file)
        # /etc/ebbtide has the options of the machine's own daemons.
        alone = ["--config", os.devnull]
        manager = [program("ebb-manager"), *alone, "--listen", f"{LOOPBACK}:{manager_port}"]
        manager += ["--token-file", str(state.manager_token_file), "--hosts-key-file", str(key_file)]
        manager += ["--database", str(manager_dir / "manager.sqlite"), "--policy", "best-fit", "--seed", "1"]
        state.daemons = [Daemon(name=MANAGER, argv=manager, log=self.logs / "manager.log")]
        for host, port in zip(hosts, agent_ports, strict=True):
            home = self.directory / "hosts" / host.id
            disks, agent_state = home / "disks", self._agent_state(host.id)
            for directory in (home.parent, home, disks, agent_state):
                make_directory(directory)
            token, reports = tokens / f"{host.id}.command-token", tokens / f"{host.id}.report-token"
            write_private(token, command_token(key, host.id) + "\n")
            write_private(reports, report_token(key, host.id) + "\n")
            capacity = ",".join(f"{name}={value:g}" for name, value in host.capacity.as_dict().items() if value > 0)
            agent = [program("ebb-hostagent"), *alone, "--id", host.id, "--listen", f"{LOOPBACK}:{port}"]
            agent += ["--token-file", str(token), "--manager", state.manager_url]
            agent += ["--manager-token-file", str(reports), "--capacity", capacity]
            agent += ["--state-dir", str(agent_state), "--disk-dir", str(disks), "--image-dir", str(image.base.parent)]
            agent += ["--uri", state.uri, "--accelerator", state.accelerator]
            agent += ["--acpi-verdict", str(paths.acpi_verdict())]
            folders = home / "libvirt" if own else None
            if folders is not None:
                own_libvirt.make_folders(folders)
                agent = inside(folders, [*agent, "--migration-uri", uri_of(folders)])
            state.daemons.append(Daemon(name=host.id, argv=agent, log=self.logs / f"{host.id}.log"))
            state.hosts.append(
                LabHost(
                    id=host.id,
                    capacity=Vector.of(host.capacity),
                    url=f"http://{LOOPBACK}:{port}",
                    token_file=token,
                    disk_dir=disks,
                    libvirt=folders,
                )
            )

    @staticmethod
    def _token(path: Path) -> Path:
        write_private(path, new_token() + "\n")
        return path

    # --- down ----------------------------------------------------------------------------------------------------

    def _clear(self, state: LabState) -> None:
        self._refuse_adopted(state)
        state.phase = "stopping"
        self._save_if_possible(state)
        ours = [daemon.process for daemon in reversed(state.daemons) if processes.running(daemon.process)]
        if ours:
            self.report("stopping the daemons")
        killed = processes.stop([process for process in ours if process is not None])
        for name in killed:
            self.report(f"{name} did not end by SIGTERM and was killed")
        if ours:
            self._refuse_adopted(state)  # one that was being adopted meanwhile
        host_ids = [host.id for host in state.hosts]
        if host_ids:
            own = [host for host in state.hosts if host.libvirt is not None]
            left = [domains.domains_left(None, outside(host.uri, domains.RUN)) for host in own]
            if (any(left) or (not own and domains.domains_left(host_ids))) and not own_libvirt.answers(state):
                self._revive(state)
            if own_libvirt.answers(state):
                # In a libvirt of the lab's own there is nothing of others, and its logs go with its folders.
                for uri in [host.uri for host in own] or [state.uri]:
                    domains.remove_domains(uri, None if own else host_ids, self.report, lambda: self._revive(state))
                if not own:
                    domains.remove_logs(host_ids)
        services.stop_services(state, self.report)
        # The state file goes last, so that a `down` that was interrupted can be repeated.
        for name in CONTENTS:
            path = self.directory / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (self.directory / LOCK).unlink(missing_ok=True)
        if self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def _refuse_adopted(self, state: LabState) -> None:
        """Without its agent nobody would give back what was taken of a domain of others, nor take our mark from it.

        :raises LabError: it has adopted VMs, or that cannot be known.
        """
        # What is in a libvirt of the lab's own goes with it.
        noted = {host.id: self._noted_as_adopted(host.id) for host in state.hosts if host.libvirt is None}
        if not own_libvirt.answers(state) and any(noted.values()):
            self._revive(state)
        if not noted or not own_libvirt.answers(state) or not (names := domains.adopted_by(state.uri, noted)):
            return
        if state.phase != "up":
            # `up` would clear it away instead of starting the daemons that a release needs.
            state.phase = "up"
            self._save_if_possible(state)
        one, first = len(names) == 1, names[0].split()[0]
        raise LabError(
            f"{', '.join(names)} {'was' if one else 'were'} adopted by this lab, which stays: without it nobody would "
            f"give back what was taken of {'it' if one else 'them'}; release {'it' if one else 'each'} first: "
            f"`ebb vm release {first} --yes` (`ebb lab up` starts daemons that do not run)"
        )

    def _noted_as_adopted(self, host: str) -> set[str] | None:
        """Names of domains; None: there is no file, or none that can be read."""
        try:
            return set(json.loads((self._agent_state(host) / "adopted.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def _agent_state(self, host: str) -> Path:
        return self.directory / "hosts" / host / "state"

    def _revive(self, state: LabState) -> None:
        make_directory(self.logs)
        self._ensure_libvirt(state, self._save_if_possible)

    def _save(self, state: LabState) -> None:
        make_directory(self.directory)
        self.file.save(state)

    def _save_if_possible(self, state: LabState) -> None:
        """For the way down, which makes room on a full disk."""
        try:
            self._save(state)
        except LabError as error:
            self.report(f"{error}; going on all the same")

    def _hosts_seen(self, state: LabState) -> list[HostStatus]:
        """What the manager says of its hosts; nothing while it does not answer."""

        async def ask() -> list[HostStatus]:
            async with ManagerClient(state.manager_url, state.manager_token_file.read_text().strip()) as client:
                return await client.hosts()

        try:
            return asyncio.run(ask())
        except (EbbError, OSError):
            return []


def program(name: str) -> str:
    """One of our own commands, beside the interpreter that runs this. Raises LabError."""
    for directory in (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent):
        if (directory / name).is_file():
            return str(directory / name)
    found = shutil.which(name)
    if found is None:
        raise LabError(f"{name} is not installed beside {sys.executable}; run `make install`")
    return found


def free_ports(count: int) -> list[int]:
    """Free ports on loopback; all different."""
    sockets = []
    try:
        for _ in range(count):
            probe = socket.socket()
            sockets.append(probe)
            probe.bind((LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()

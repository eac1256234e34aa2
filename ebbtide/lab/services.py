"""dbus, virtlogd and libvirtd: left alone where they run, started where no service manager does it, stopped again.

libvirt's system instance needs all three: https://libvirt.org/daemons.html.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.lab import kvm_device, processes
from ebbtide.lab.errors import LabError
from ebbtide.lab.namespace import inside
from ebbtide.lab.state import LabState, Process, make_open_directory

#: Of programs of root, whoever asks.
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

SYSTEMD = Path("/run/systemd/system")
BRIDGE = Path("/sys/class/net/virbr0")
NETWORK = "default"
START_S = 30.0


@dataclass(frozen=True)
class Service:
    """One service: how to see that it answers, and how to run it in the foreground."""

    name: str
    sockets: tuple[Path, ...]
    argv: tuple[str, ...]
    package: str
    #: Where it has folders of its own for libvirt's (`ebbtide.lab.namespace`); None: it sees the machine's.
    folders: Path | None = None

    def answers(self) -> bool:
        """Whether a process accepts connections on one of its sockets; a stale socket file does not count."""
        return any(_accepts(path) for path in self.sockets)


PACKAGE = "libvirt-daemon-system"
DBUS = Service(
    "dbus",
    (Path("/run/dbus/system_bus_socket"), Path("/var/run/dbus/system_bus_socket")),
    ("dbus-daemon", "--system", "--nofork", "--nopidfile"),
    "dbus",
)
VIRTLOGD = Service("virtlogd", (Path("/run/libvirt/virtlogd-sock"),), ("virtlogd",), PACKAGE)
# The second socket is that of the modular daemon, which has taken libvirtd's place elsewhere.
LIBVIRTD = Service(
    "libvirtd",
    (Path("/run/libvirt/libvirt-sock"), Path("/run/libvirt/virtqemud-sock")),
    ("libvirtd",),
    PACKAGE,
)
SERVICES = (DBUS, VIRTLOGD, LIBVIRTD)


def libvirts_unit(path: str = SEARCH_PATH) -> str:
    """What systemd starts: the modular daemon's socket, where that has taken libvirtd's place.

    Some distributions install both, and have one of them enabled.

    :param path: where programs are looked for.
    """
    modular = shutil.which("virtqemud", path=path) is not None
    if modular and shutil.which("libvirtd", path=path):
        modular = _enabled("virtqemud.socket", path)
    return "virtqemud.socket" if modular else "libvirtd"


def _enabled(unit: str, path: str) -> bool:
    systemctl = shutil.which("systemctl", path=path)
    if systemctl is None:
        return False
    asked = [systemctl, "is-enabled", "--quiet", unit]
    try:
        return subprocess.run(asked, stderr=subprocess.DEVNULL, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def ensure_services(state: LabState, logs: Path, save: Callable[[], None], report: Callable[[str], None]) -> None:
    """Make libvirt answer; what had to be started stands in ``state.services`` afterwards.

    ``save`` is called after each start. Raises LabError with the end of the log of a service that does not come up.
    """
    forget_ended(state, logs, report)
    if LIBVIRTD.answers():
        return
    if SYSTEMD.is_dir():
        unit = libvirts_unit()
        report(f"starting {unit} through systemd")
        _systemctl("start", unit)
        _await(LIBVIRTD, None, None)
        return
    if state.kvm_before is None:
        state.kvm_before = kvm_device.open_to_guests()
        save()
    if state.bridge_was_there is None:
        state.bridge_was_there = BRIDGE.exists()
        save()
    for service in SERVICES:
        start_service(service, state, logs, save, report)


def forget_ended(state: LabState, logs: Path, report: Callable[[str], None]) -> None:
    """Take services that have ended out of the state, and say how they did."""
    for process in [process for process in state.services if processes.running(process) is None]:
        log = logs / f"{process.name}.log"
        report(f"{process.name} (pid {process.pid}) {processes.how_ended(process)}; its log:\n{processes.tail(log)}")
        state.services.remove(process)


def start_service(
    service: Service, state: LabState, logs: Path, save: Callable[[], None], report: Callable[[str], None]
) -> None:
    """Start a service that does not answer; it stands in ``state.services`` then. Raises LabError as the others."""
    if service.answers():
        return
    report(f"starting {service.name}")
    for path in service.sockets[:1]:
        make_open_directory(path.parent)
    log = logs / f"{service.name}.log"
    argv = [_program(service), *service.argv[1:]]
    process = processes.start(service.name, argv if service.folders is None else inside(service.folders, argv), log)
    state.services.append(process)
    save()
    _await(service, process, log)


def stop_services(state: LabState, report: Callable[[str], None]) -> None:
    """Stop what ensure_services started, unless another domain needs it. Nothing is left in ``state.services``."""
    ours = [process for process in state.services if processes.running(process)]
    if any(process.name == LIBVIRTD.name for process in ours):
        active = active_domains(state.uri)
        if active:
            report(f"libvirtd goes on: {', '.join(active)} still runs")
            state.services = []
            return
        if state.network_started or state.bridge_was_there is False:
            _destroy_network(state.uri)
    for process in reversed(ours):
        report(f"stopping {process.name}")
        processes.stop([process])
    state.services = []
    if state.kvm_before is not None:
        kvm_device.restore(state.kvm_before)
        state.kvm_before = None


def open_libvirt(uri: str, read_only: bool = False) -> Any:
    """A connection of libvirt-python. Raises LabError when the bindings are missing or libvirt does not answer.

    ``read_only``: for looking, which libvirt also lets others than root do.
    """
    try:
        import libvirt
    except ImportError as error:
        raise LabError("libvirt-python is not installed: pip install libvirt-python (needs libvirt-dev)") from error
    libvirt.registerErrorHandler(lambda context, problem: None, None)
    try:
        return libvirt.openReadOnly(uri) if read_only else libvirt.open(uri)
    except libvirt.libvirtError as error:
        raise LabError(f"libvirt does not answer at {uri}: {error}") from error


def active_domains(uri: str) -> list[str]:
    """Names of all running domains, ours or not."""
    connection = open_libvirt(uri)
    try:
        return sorted(domain.name() for domain in connection.listAllDomains() if domain.isActive())
    finally:
        connection.close()


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _program(service: Service) -> str:
    path = shutil.which(service.argv[0], path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin")
    if path is None:
        raise LabError(f"{service.argv[0]} is not installed; on Debian: apt-get install {service.package}")
    return path


def _systemctl(verb: str, unit: str) -> None:
    done = subprocess.run(["systemctl", verb, unit], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"systemctl {verb} {unit} failed: {done.stderr.strip()}")


def _await(service: Service, process: Process | None, log: Path | None) -> None:
    deadline_s = time.monotonic() + START_S
    while not service.answers():
        ended = process is not None and processes.running(process) is None
        if ended or time.monotonic() > deadline_s:
            words = "ended at once" if ended else f"does not answer after {START_S:g} s"
            raise LabError(f"{service.name} {words}: {processes.tail(log) if log else 'see its journal'}")
        time.sleep(0.1)


def _network(connection: Any) -> Any:
    """libvirt's default network; None if it is not there or down."""
    for network in connection.listAllNetworks():
        if network.name() == NETWORK and network.isActive():
            return network
    return None


def _destroy_network(uri: str) -> None:
    connection = open_libvirt(uri)
    try:
        network = _network(connection)
        if network is not None:
            network.destroy()
    finally:
        connection.close()

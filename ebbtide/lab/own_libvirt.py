"""libvirt of one lab host alone: virtlogd and libvirtd that share nothing with the machine's but the kernel.

They and the host's agent run in namespaces (`ebbtide.lab.namespace`) over folders in the lab's directory.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ebbtide.lab import kvm_device, services
from ebbtide.lab.errors import LabError
from ebbtide.lab.namespace import FOLDERS, SOCKET
from ebbtide.lab.services import DBUS, PACKAGE, Service, forget_ended, start_service
from ebbtide.lab.state import LabState, make_directory, make_open_directory

#: The longest path of a Unix socket, bytes (unix(7)).
MOST_PATH: Final = 107


def make_folders(home: Path) -> None:
    """Fill a host's folders: the system's settings without its domains and networks, and an identity of its own.

    :raises LabError: the path is too long for a socket.
    """
    if len(str(home / "run" / SOCKET)) > MOST_PATH:
        raise LabError(f"{home / 'run' / SOCKET} is too long for a socket: choose a shorter directory for the lab")
    for name, there in FOLDERS.items():
        make_directory(home / name)
        make_open_directory(there)  # what is bound over has to be there
    etc = home / "etc"
    shutil.copytree(FOLDERS["etc"], etc, dirs_exist_ok=True, ignore=shutil.ignore_patterns("qemu", "secrets"))
    # What libvirt found out of QEMU, so that it need not start it to ask again.
    shutil.copytree(FOLDERS["cache"], home / "cache", dirs_exist_ok=True)
    # libvirt takes two daemons of one identity for one host, and moves nothing between them.
    _set(etc / "libvirtd.conf", host_uuid=str(uuid.uuid4()))


def _set(path: Path, **values: str) -> None:
    """Write settings into a file of libvirt's, whatever stood there of them."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if re.match(r"\s*(\w*)", line)[1] not in values]  # type: ignore[index]  # matches any
    path.write_text("\n".join([*kept, *(f'{name} = "{value}"' for name, value in values.items())]) + "\n")


def services_of(host_id: str, home: Path) -> tuple[Service, ...]:
    """What runs for a host, in the order in which it is started."""

    def service(name: str, socket: str) -> Service:
        # The usual pid file lies beside libvirt's folders, where the machine's own has it.
        argv = (name, "--pid-file", f"{FOLDERS['run']}/{name}.pid")
        return Service(f"{name}-{host_id}", (home / "run" / socket,), argv, PACKAGE, home)

    return service("virtlogd", "virtlogd-sock"), service("libvirtd", SOCKET)


def answers(state: LabState) -> bool:
    """Whether libvirt does: the machine's, or that of each host."""
    own = [(host.id, host.libvirt) for host in state.hosts if host.libvirt is not None]
    return all(services_of(*of)[-1].answers() for of in own) if own else services.LIBVIRTD.answers()


def ensure_own(state: LabState, logs: Path, save: Callable[[], None], report: Callable[[str], None]) -> None:
    """Start what does not answer of the services of hosts with a libvirt of their own.

    :raises LabError: one does not come up, with the end of its log.
    """
    forget_ended(state, logs, report)
    if state.kvm_before is None:
        state.kvm_before = kvm_device.open_to_guests()
        save()
    start_service(DBUS, state, logs, save, report)
    for host in state.hosts:
        if host.libvirt is not None:
            for service in services_of(host.id, host.libvirt):
                start_service(service, state, logs, save, report)

"""Mount namespace of one lab host, in which folders of its own lie over libvirt's.

It ends with the processes in it, so that nothing has to be unmounted, also after a crash.
https://man7.org/linux/man-pages/man1/unshare.1.html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: What libvirt calls its folders, by their names in a host's own.
FOLDERS: Final = {
    "run": Path("/run/libvirt"),
    "lib": Path("/var/lib/libvirt"),
    "etc": Path("/etc/libvirt"),
    "log": Path("/var/log/libvirt"),
    "cache": Path("/var/cache/libvirt"),
}
SOCKET: Final = "libvirt-sock"
#: Binds each folder and becomes the command: it keeps its process id.
_BIND = "".join(f'mount --bind "$0/{name}" {there}; ' for name, there in FOLDERS.items())


def uri_of(home: Path) -> str:
    """The connection to the libvirtd whose folders are in ``home``, from outside of its namespace."""
    return f"qemu+unix:///system?socket={home / 'run' / SOCKET}"


def inside(home: Path, argv: Sequence[str]) -> list[str]:
    """The command that runs another one where ``home`` is libvirt's."""
    return ["unshare", "--mount", "--propagation", "private", "sh", "-euc", _BIND + 'exec "$@"', str(home), *argv]


def outside(uri: str, path: Path) -> Path:
    """Where a path that libvirt at ``uri`` says lies for who is not in its namespace."""
    _, named, socket = uri.partition("?socket=")
    home = Path(socket).parent.parent
    for name, there in FOLDERS.items():
        if named and path.is_relative_to(there):
            return home / name / path.relative_to(there)
    return path

"""As whom the process acts."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

#: Whose rights the manager's service has, and what systemd makes for it at its start (packaging/systemd).
SERVICE_USER: Final = "ebbtide"
SERVICE_DIRECTORY: Final = Path("/var/lib/ebbtide/manager")
#: There where systemd runs.
SYSTEMD: Final = Path("/run/systemd/system")
LIMIT_S: Final = 10.0


def service_user() -> pwd.struct_passwd | None:
    """The user of the manager's service, where root asks and there is one."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(_user_of_unit() or SERVICE_USER)
    except KeyError:
        return None


def _user_of_unit() -> str | None:
    """As systemd has it, with drop-ins: for tasks of several users it is root. None: no systemd, or no unit."""
    if not SYSTEMD.is_dir():
        return None
    asked = ("systemctl", "show", "--property=LoadState,User", "ebb-manager.service")
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    return (said.get("User") or "root") if said.get("LoadState") == "loaded" else None


@contextmanager
def acting_as(uid: int, gid: int, groups: Sequence[int] = ()) -> Iterator[None]:
    """As another user, if we are root, for the whole process: all its threads, and not after the end of the block.

    :param groups: the user's supplementary groups.
    """
    if os.geteuid() != 0 or uid == 0:
        yield
        return
    before = os.getgroups()
    os.setgroups(groups)
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(os.getgid())
        os.setgroups(before)

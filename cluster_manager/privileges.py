"""As whom the process acts."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

#: Whose rights the manager's service has, and what systemd makes for it at its start (packaging/systemd).
SERVICE_USER: Final = "ebbtide"
SERVICE_DIRECTORY: Final = Path("/var/lib/ebbtide/manager")


def service_user() -> pwd.struct_passwd | None:
    """The user of the manager's service, where root asks and there is one."""
    try:
        return pwd.getpwnam(SERVICE_USER) if os.geteuid() == 0 else None
    except KeyError:
        return None


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

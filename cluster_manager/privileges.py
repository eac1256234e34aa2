"""As whom the process acts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


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

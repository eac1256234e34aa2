"""Writes small initial RAM file systems without any tool of the host."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One entry of an archive: `path` without a leading slash, `mode` with its file type bits (`stat.S_IF*`).

    `data` is the content of a regular file or the target of a symbolic link.
    """

    path: str
    mode: int
    data: bytes = b""


def directory(path: str) -> Entry:
    return Entry(path, stat.S_IFDIR | 0o755)


def file(path: str, data: bytes, permissions: int = 0o644) -> Entry:
    return Entry(path, stat.S_IFREG | permissions, data)


def link(path: str, target: str) -> Entry:
    return Entry(path, stat.S_IFLNK | 0o777, target.encode())


def archive(entries: Iterable[Entry]) -> bytes:
    """An uncompressed cpio archive in the `newc` form.

    Source: Linux, Documentation/driver-api/early-userspace/buffer-format.rst. All entries belong to root
    and carry time 0, so equal entries give equal bytes. Directories must come before what they hold.
    """
    parts = [_record(number, entry) for number, entry in enumerate(entries, start=1)]
    parts.append(_record(0, Entry("TRAILER!!!", 0)))
    return b"".join(parts)


def _record(inode: int, entry: Entry) -> bytes:
    name = entry.path.encode() + b"\0"
    # ino, mode, uid, gid, nlink, mtime, filesize, maj, min, rmaj, rmin, namesize, chksum
    fields = (inode, entry.mode, 0, 0, 1, 0, len(entry.data), 0, 0, 0, 0, len(name), 0)
    header = b"070701" + b"".join(b"%08x" % value for value in fields)
    return _padded(header + name) + _padded(entry.data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)

"""Check of the files that XML names: no symbolic link leads out, no backing file is elsewhere.

A qcow2 image names its backing file itself, so the image of a guest that is allowed could read any file of the host;
and the format of that file, by which QEMU may take it for a descriptor that names yet another one.
"""

from __future__ import annotations

import os
import shlex
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hostagent.domain_xml.xml_allow_list import FileUse, XMLRefused

#: Of a chain of backing files.
LONGEST_CHAIN: Final = 16
_MAGIC: Final = b"QFI\xfb"
#: Bit of the incompatible features: the data lies in another file.
_EXTERNAL_DATA: Final = 1 << 2
#: The header extension that names the format of the backing file, and the formats that name no file but a backing one.
_BACKING_FORMAT: Final = 0xE2792ACA
_FORMATS: Final = (b"raw", b"qcow2")
#: A header ends in its cluster, and no cluster is larger.
_LARGEST_HEADER: Final = 1 << 21


def check_files(uses: Sequence[FileUse], prefixes: Sequence[str]) -> frozenset[str]:
    """Look at each file. Blocks: call it in a thread.

    :returns: paths of qcow2 images that have no backing file.
    :raises XMLRefused: one is not there, is no plain file, or leads out of the prefixes.
    """
    roots = [os.path.realpath(prefix) for prefix in prefixes]
    alone = set()
    for use in uses:
        if _check_chain(use, roots):
            alone.add(use.path)
    return frozenset(alone)


def _check_chain(use: FileUse, roots: Sequence[str]) -> bool:
    """:returns: whether it is a qcow2 image without a backing file."""
    path, form = use.path, use.format
    for depth in range(LONGEST_CHAIN):
        real = os.path.realpath(path)
        if not any(real.startswith(root.rstrip("/") + "/") for root in roots):
            raise XMLRefused(f"{use.where}: {path} leads to {real}, which lies outside of {' and '.join(roots)}")
        try:
            if not stat.S_ISREG(os.stat(real).st_mode):
                raise XMLRefused(f"{use.where}: {path} is no plain file")
            # Whatever format a backing file is said to have: one that is an image may name another file.
            if form == "raw" and depth and _is_image(real):
                form = "qcow2"
            if form != "qcow2":
                return False
            backing = _backing_of(Path(real), use.where)
        except OSError as error:
            raise XMLRefused(f"{use.where}: {path} cannot be read: {error.strerror}") from error
        if backing is None:
            return depth == 0
        # As QEMU and libvirt join them: beside the name of the image, not beside where a link of that name leads.
        name, form = backing
        path = os.path.join(os.path.dirname(path), name)
    raise XMLRefused(f"{use.where}: {use.path} has more than {LONGEST_CHAIN} backing files")


def _is_image(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == _MAGIC


def _backing_of(path: Path, where: str) -> tuple[str, str] | None:
    """The backing file that a qcow2 image names, and its format (docs/interop/qcow2.txt of QEMU). It is not opened.

    :raises XMLRefused: it is no qcow2 image, or names something that is no file's path, or that may name other files.
    """
    with path.open("rb") as file:
        header = file.read(112)
        if len(header) < 72 or header[:4] != _MAGIC:
            raise XMLRefused(f"{where}: {path} is no qcow2 image")
        version, offset, size = struct.unpack(">IQI", header[4:20])
        if version >= 3 and len(header) < 104:
            raise XMLRefused(f"{where}: {path} is no qcow2 image: its header is cut short")
        if version >= 3 and struct.unpack(">Q", header[72:80])[0] & _EXTERNAL_DATA:
            raise XMLRefused(f"{where}: {path} keeps its data in another file")
        if not offset:
            return None
        if size > 1023 or offset > _LARGEST_HEADER:
            raise XMLRefused(f"{where}: {path} has a broken header")
        file.seek(0)
        whole = file.read(offset)
        name = file.read(size).decode("utf-8", "replace")
    if not name or "\0" in name or name.startswith("json:") or (":" in name.split("/")[0]):
        raise XMLRefused(f"{where}: {path} has a backing file that is no path: {name!r}")
    formats = _backing_formats(whole, struct.unpack(">I", header[100:104])[0] if version >= 3 else 72)
    if not formats:
        raise XMLRefused(
            f"{where}: {path} does not say the format of its backing file, which would be guessed: write it with "
            f"qemu-img rebase -u -F raw -b {shlex.quote(name)} {shlex.quote(str(path))} (or -F qcow2)"
        )
    for form in formats:
        if form not in _FORMATS:
            said = form[:16].decode("ascii", "replace")
            raise XMLRefused(f"{where}: {path} has a backing file of the format {said!r} (allowed: raw, qcow2)")
    return name, formats[-1].decode()


def _backing_formats(header: bytes, begin: int) -> list[bytes]:
    """What extensions of a header name as the format of the backing file, all of them: QEMU goes by the last one."""
    found = []
    while begin + 8 <= len(header):
        kind, length = struct.unpack(">II", header[begin : begin + 8])
        begin += 8
        if kind == _BACKING_FORMAT:
            found.append(header[begin : begin + length])
        if not kind:
            break
        begin += (length + 7) & ~7
    return found

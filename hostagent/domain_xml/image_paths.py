"""Check of the files that XML names: no symbolic link leads out, no backing file is elsewhere.

A qcow2 image names its backing file itself, so the image of a guest that is allowed could read any file of the host.
"""

from __future__ import annotations

import os
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
#: Of a place in a file.
_LARGEST_OFFSET: Final = (1 << 63) - 1


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
            if form != "qcow2" and (depth == 0 or not _is_image(real)):
                return False
            backing = _backing_of(Path(real))
        except OSError as error:
            raise XMLRefused(f"{use.where}: {path} cannot be read: {error.strerror}") from error
        if backing is None:
            return depth == 0
        path, form = os.path.join(os.path.dirname(real), backing), "raw"
    raise XMLRefused(f"{use.where}: {use.path} has more than {LONGEST_CHAIN} backing files")


def _is_image(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == _MAGIC


def _backing_of(path: Path) -> str | None:
    """The backing file that a qcow2 image names (docs/interop/qcow2.txt of QEMU). It is not opened here.

    :raises XMLRefused: it is no qcow2 image, or names something that is no file's path.
    """
    with path.open("rb") as file:
        header = file.read(112)
        if len(header) < 72 or header[:4] != _MAGIC:
            raise XMLRefused(f"{path} is no qcow2 image")
        version, offset, size = struct.unpack(">IQI", header[4:20])
        if version >= 3 and len(header) < 80:
            raise XMLRefused(f"{path} is no qcow2 image: its header is cut short")
        if version >= 3 and struct.unpack(">Q", header[72:80])[0] & _EXTERNAL_DATA:
            raise XMLRefused(f"{path} keeps its data in another file")
        if not offset:
            return None
        if size > 1023 or offset > _LARGEST_OFFSET:
            raise XMLRefused(f"{path} has a broken header")
        file.seek(offset)
        name = file.read(size).decode("utf-8", "replace")
    if not name or "\0" in name or name.startswith("json:") or (":" in name.split("/")[0]):
        raise XMLRefused(f"{path} has a backing file that is no path: {name!r}")
    return name

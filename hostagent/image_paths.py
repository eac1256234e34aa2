"""Whether the files that XML names lead where they seem to: no symbolic link out, no backing file elsewhere.

A qcow2 image names its backing file itself, so the image of a guest that is allowed could read any file of the host.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hostagent.xml_allow_list import FileUse, XMLRefused

#: Of a chain of backing files.
LONGEST_CHAIN: Final = 16
_MAGIC: Final = b"QFI\xfb"
#: Bit of the incompatible features: the data lies in another file.
_EXTERNAL_DATA: Final = 1 << 2


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
            if form != "qcow2":
                return False
            backing, form = _backing_of(Path(real))
        except OSError as error:
            raise XMLRefused(f"{use.where}: {path} cannot be read: {error.strerror}") from error
        if backing is None:
            return depth == 0
        path = os.path.join(os.path.dirname(real), backing)
    raise XMLRefused(f"{use.where}: {use.path} has more than {LONGEST_CHAIN} backing files")


def _backing_of(path: Path) -> tuple[str | None, str]:
    """The backing file that a qcow2 image names, and its format (docs/interop/qcow2.txt of QEMU).

    :raises XMLRefused: it is no qcow2 image, or names something that is no file's path.
    """
    with path.open("rb") as file:
        header = file.read(112)
        if len(header) < 72 or header[:4] != _MAGIC:
            raise XMLRefused(f"{path} is no qcow2 image")
        version, offset, size = struct.unpack(">IQI", header[4:20])
        if version >= 3 and struct.unpack(">Q", header[72:80])[0] & _EXTERNAL_DATA:
            raise XMLRefused(f"{path} keeps its data in another file")
        if not offset:
            return None, "raw"
        if size > 1023:
            raise XMLRefused(f"{path} has a broken header")
        file.seek(offset)
        name = file.read(size).decode("utf-8", "replace")
    if not name or "\0" in name or name.startswith("json:") or (":" in name.split("/")[0]):
        raise XMLRefused(f"{path} has a backing file that is no path: {name!r}")
    # Whatever format it is said to have: an image that is one may name another file.
    real = os.path.realpath(os.path.join(path.parent, name))
    try:
        with open(real, "rb") as backing:
            return name, "qcow2" if backing.read(4) == _MAGIC else "raw"
    except OSError:
        return name, "raw"

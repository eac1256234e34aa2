"""Files as blocks of whole lines, decompressed on the way: gzip and zstd by their first bytes, not by their name."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias, cast

from ebbtide.simulator.errors import TraceError

#: Bytes of one block: large enough for array code, small enough that a thousand lines more or less do not count.
BLOCK_BYTES: Final = 1 << 22
#: Bytes of one line above which a file is no table: its reader has to hold it.
LINE_BYTES: Final = 1 << 24
_READ_BYTES: Final = 1 << 18
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_BOM: Final = b"\xef\xbb\xbf"

#: Called with bytes of the file read so far and its size.
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a file; every line ends with a line feed, carriage returns before it are gone."""

    data: bytes
    #: The number of the first line, from 1 on.
    first_line: int

    def lines(self) -> list[bytes]:
        """The lines without their ends."""
        return self.data[:-1].split(b"\n") if self.data else []


def blocks(path: Path, progress: Progress | None = None, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """All lines of a file.

    :raises TraceError: it cannot be read, its compression is broken, or a line is longer than `LINE_BYTES`.
    """
    line = 1
    parts: list[bytes] = []
    held = unended = 0
    for chunk in _chunks(path, progress):
        end = chunk.rfind(b"\n") + 1
        unended = len(chunk) - end if end else unended + len(chunk)
        if unended > LINE_BYTES:
            line += sum(p.count(b"\n") for p in (*parts, chunk))
            raise TraceError(str(path), f"is longer than {LINE_BYTES >> 20} MiB", line=line, field="line")
        if held + len(chunk) < block_bytes or not end:
            parts.append(chunk)
            held += len(chunk)
            continue
        block = _block(b"".join((*parts, chunk[:end])), line)
        parts, held = [chunk[end:]], len(chunk) - end
        line += block.data.count(b"\n")
        yield block
    rest = b"".join(parts)
    if rest:
        yield _block(rest if rest.endswith(b"\n") else rest + b"\n", line)


def head(path: Path, count: int) -> list[bytes]:
    """The first lines of a file, at most ``count``; an unfinished last line of a large file is left out."""
    for block in blocks(path, block_bytes=_READ_BYTES):
        return block.lines()[:count]
    return []


def magic(path: Path, count: int = 4) -> bytes:
    """The first bytes of the file as it is on disk."""
    with open_raw(path) as raw:
        return raw.read(count)


def whole(path: Path, most_bytes: int, progress: Progress | None = None) -> bytes:
    """A small file in one piece, decompressed.

    :raises TraceError: it has more than ``most_bytes``, or cannot be read.
    """
    data = bytearray()
    for chunk in _chunks(path, progress):
        data += chunk
        if len(data) > most_bytes:
            raise TraceError(str(path), f"is one document of more than {most_bytes >> 20} MiB")
    return bytes(data)


def open_raw(path: Path) -> BinaryIO:
    """The file as it is on disk.

    :raises TraceError: there is none, or it is no regular file.
    """
    try:
        if not path.is_file():
            raise TraceError(str(path), "is no regular file" if path.exists() else "does not exist")
        return path.open("rb")
    except (OSError, ValueError) as error:
        raise TraceError(str(path), f"cannot be opened: {error}") from error


def _block(data: bytes, first_line: int) -> Block:
    if first_line == 1 and data.startswith(_BOM):
        data = data[len(_BOM) :]
    return Block(data.replace(b"\r\n", b"\n") if b"\r" in data else data, first_line)


def _chunks(path: Path, progress: Progress | None) -> Iterator[bytes]:
    with open_raw(path) as raw:
        size = path.stat().st_size
        line = 1
        try:
            with _decompressed(path, raw) as stream:
                while chunk := stream.read(_READ_BYTES):
                    if progress is not None:
                        progress(raw.tell(), size)
                    line += chunk.count(b"\n")
                    yield chunk
        except (OSError, EOFError, zlib.error, ValueError) as error:
            # ValueError: what pyarrow says of broken zstd.
            raise TraceError(str(path), f"is broken: {error}", line=line, field="compression") from error
        if progress is not None:
            progress(size, size)


def _decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    start = raw.read(4)
    raw.seek(0)
    if start.startswith(_GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if start == _ZSTD:
        try:
            import pyarrow
        except ImportError as error:
            problem = "is zstd, which needs pyarrow: install ebbtide[sim]"
            raise TraceError(str(path), problem, field="compression") from error
        return cast(BinaryIO, pyarrow.CompressedInputStream(_Stays(raw), "zstd"))
    return _Stays(raw)


class _Stays(io.RawIOBase, BinaryIO):
    """A file that is closed by who opened it, so that its position can be read to the end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw

    def read(self, size: int = -1, /) -> bytes:
        return self._raw.read(size)

    def readable(self) -> bool:
        return True

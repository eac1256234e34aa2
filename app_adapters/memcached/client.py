"""A client of memcached's text protocol, for what an operator does (memcached: doc/protocol.txt)."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass
from typing import Callable, Iterator, Tuple
from urllib.parse import unquote_to_bytes

from app_adapters.errors import ApplicationError

MIB = 1024 * 1024
CHUNK_BYTES = 262144
STOP_LOOK_S = 0.1
#: The rest of a dump is read for so long at most.
REST_LIMIT_S = 5.0
# The key is percent-encoded; la = a time of access, fetch = whether it was ever read, size = bytes with header.
_DUMPED = re.compile(rb"key=(\S+) exp=\S+ la=(\d+) cas=\S+ fetch=(\S+) cls=(\d+) size=(\d+)")
_READ = re.compile(rb" type=item_get key=(\S+) status=found ")
_UNSAFE = re.compile(rb"[\x00-\x20\x7f]")


@dataclass(frozen=True)
class SlabClass:
    """A slab class: pages of 1 MiB cut into chunks of one size."""

    id: int
    chunks_per_page: int
    pages: int
    free_chunks: int
    used_chunks: int = 0


@dataclass(frozen=True)
class Slabs:
    """All slab classes, and the bytes that all pages together take."""

    classes: dict[int, SlabClass]
    malloced_bytes: int


#: An item of the cache as it is dumped, unconverted, since there may be millions: its key (percent-encoded), its time
#: of access (Unix time), whether it was ever read (yes, no), the id of its class, its size with header in bytes.
Item = Tuple[bytes, bytes, bytes, bytes, bytes]


class Busy(ApplicationError):
    """memcached does something that excludes this; it may be asked again soon."""


class MemcachedClient:
    """One connection, made when it is first needed. Not for several threads.

    Every method raises ApplicationError where memcached cannot be reached or answers something else.
    """

    def __init__(self, host: str, port: int, timeout_s: float = 5.0) -> None:
        self._address = (host, port)
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._dumping = False

    def close(self) -> None:
        """Close the connection; the next call makes a new one."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._buffer, self._dumping = None, b"", False

    def stats(self, what: str = "") -> dict[str, str]:
        """Names and values of `stats` or one of its parts (`settings`, `slabs`)."""
        self._send(b"stats %b\r\n" % what.encode("ascii") if what else b"stats\r\n")
        found: dict[str, str] = {}
        while True:
            line = self._line()
            if line == b"END":
                return found
            parts = line.decode("utf-8", "replace").split(" ", 2)
            if parts[0] != "STAT" or len(parts) < 2:
                raise self._unexpected("stats " + what, line)
            found[parts[1]] = parts[2] if len(parts) > 2 else ""

    def slabs(self) -> Slabs:
        """Slab classes and their sum."""
        stats = self.stats("slabs")
        by_class: dict[int, dict[str, int]] = {}
        for name, value in stats.items():
            id_, colon, key = name.partition(":")
            if colon and id_.isdigit():
                by_class.setdefault(int(id_), {})[key] = int(value)
        classes = {
            id_: SlabClass(
                id_,
                values["chunks_per_page"],
                values["total_pages"],
                values["free_chunks"] + values.get("free_chunks_end", 0),
                values["used_chunks"],
            )
            for id_, values in by_class.items()
        }
        return Slabs(classes, int(stats.get("total_malloced", "0")))

    def set_limit(self, limit_mib: int) -> None:
        """`cache_memlimit`. That memcached agrees frees nothing by itself."""
        self._send(b"cache_memlimit %d\r\n" % limit_mib)
        line = self._line()
        if line != b"OK":
            raise ApplicationError(f"cache_memlimit {limit_mib} was answered with {line.decode('utf-8', 'replace')}")

    def reassign(self, source: int) -> None:
        """Start to move one page of a class to the global pool, where it is freed while memory is over the limit.

        Raises: Busy while another page moves.
        """
        self._send(b"slabs reassign %d 0\r\n" % source)
        line = self._line()
        if line.startswith(b"BUSY"):
            raise Busy(line.decode("utf-8", "replace"))
        if line != b"OK":
            raise ApplicationError(f"slabs reassign {source} 0 was answered with {line.decode('utf-8', 'replace')}")

    def watch_reads(self, seconds: float, most: int, stop: Callable[[], bool]) -> dict[bytes, int]:
        """How often each item was read in so many seconds, by percent-encoded key.

        It ends early with `most` keys, or when `stop` says so.

        On a connection of its own, since watching ends with it. A memcached with much to do leaves reads out
        (logger.c), one that must not be watched (-W) gives none.
        """
        found: dict[bytes, int] = {}
        end, rest = time.monotonic() + seconds, b""
        try:
            with socket.create_connection(self._address, self._timeout_s) as watcher:
                watcher.sendall(b"watch fetchers\r\n")
                while len(found) < most and not stop() and (left := end - time.monotonic()) > 0:
                    watcher.settimeout(min(left, STOP_LOOK_S))
                    try:
                        data = watcher.recv(CHUNK_BYTES)
                    except socket.timeout:
                        continue
                    if not data or data.startswith((b"CLIENT_ERROR", b"ERROR", b"SERVER_ERROR")):
                        break
                    lines, newline, rest = (rest + data).rpartition(b"\n")
                    for key in _READ.findall(lines + newline):
                        found[key] = found.get(key, 0) + 1
        except OSError as error:
            raise self._lost(error) from None
        return found

    def metadump(self, what: str = "all") -> Iterator[list[Item]]:
        """All items, many at a time; `hash` in the order of the hash table, which is none.

        Raises: Busy while memcached's own crawler runs.
        """
        self._send(b"lru_crawler metadump %b\r\n" % what.encode("ascii"))
        first = True
        while True:
            data = self._buffer
            if first and data.startswith(b"BUSY"):
                raise Busy(self._line().decode("utf-8", "replace"))
            if first and data and not data.startswith((b"key=", b"END")) and b"\n" in data:
                raise self._unexpected("lru_crawler metadump", self._line())
            cut = data.rfind(b"\n") + 1
            if cut:
                first, self._dumping = False, not _is_end(data)
                self._buffer = data[cut:]
                yield _DUMPED.findall(data[:cut])
                if not self._dumping:
                    return
            self._receive()

    def leave_dump(self, read_rest: bool) -> None:
        """End a dump that is not read to its end: the connection is closed, or the rest read from it for a while."""
        end = time.monotonic() + REST_LIMIT_S
        while self._dumping and read_rest and time.monotonic() < end:
            self._receive()
            self._dumping = not _is_end(self._buffer)
            self._buffer = self._buffer[self._buffer.rfind(b"\n") + 1 :]
        if self._dumping:
            self.close()

    def delete_quietly(self, keys: list[bytes]) -> None:
        """Delete items by percent-encoded key, without an answer."""
        commands = []
        for key in keys:
            raw = unquote_to_bytes(key) if b"%" in key else key
            if not _UNSAFE.search(raw):  # such a key can only be reached by the binary protocol
                commands.append(b"delete %b noreply\r\n" % raw)
        self._send(b"".join(commands))

    def settle(self) -> None:
        """Wait until all that was sent before has been done. Not by `mn`: servers before 1.6.6 may not know it."""
        self._send(b"version\r\n")
        line = self._line()
        if not line.startswith(b"VERSION "):
            raise self._unexpected("version", line)

    def _unexpected(self, command: str, line: bytes) -> ApplicationError:
        self.close()  # the rest of such an answer would be taken for the next one
        return ApplicationError(f"{command.strip()} was answered with {line[:200].decode('utf-8', 'replace')}")

    def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            self._receive()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.rstrip(b"\r")

    def _send(self, data: bytes) -> None:
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self._address, self._timeout_s)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from None

    def _receive(self) -> None:
        if self._socket is None:
            raise ApplicationError("the connection to memcached was closed")
        try:
            data = self._socket.recv(CHUNK_BYTES)
        except OSError as error:
            raise self._lost(error) from None
        if not data:
            raise self._lost(ConnectionError("it closed the connection"))
        self._buffer += data

    def _lost(self, error: OSError) -> ApplicationError:
        self.close()
        return ApplicationError(f"memcached at {self._address[0]}:{self._address[1]} cannot be reached: {error}")


def _is_end(dumped: bytes) -> bool:
    """Whether a part of a dump is its last: END comes at the start of a line, which an item's line never is."""
    return dumped.endswith(b"END\r\n") and (len(dumped) == 5 or dumped[-6:-5] == b"\n")

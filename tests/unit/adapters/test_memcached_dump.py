"""A memcached before 1.6.26 may crash where its client hangs up while it ends a dump."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from app_adapters.adapter import Deadline
from app_adapters.errors import ApplicationError
from app_adapters.memcached.client import MIB, MemcachedClient
from app_adapters.memcached.items import SAMPLE, _dump, delete_coldest

ITEMS = SAMPLE + 10_000
#: Lines of a dump: many more than both passes need, so that neither reads its end together with its last lines.
DUMPED = 2 * ITEMS
LINE = b"key=k%06d exp=-1 la=%d cas=1 fetch=no cls=1 size=900\n"


class Dumping:
    """A memcached that says it has `count` items of which `ITEMS` take pages, and dumps `DUMPED`."""

    def __init__(self, count: int) -> None:
        self.count = count
        #: Of each dump, whether its client hung up instead of asking for something else.
        self.hung_up: list[bool] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        has_dumped = False
        with connection, connection.makefile("rb") as lines:
            while True:
                line = b""
                with contextlib.suppress(OSError):  # hung up with a part of the dump unread
                    line = lines.readline()
                if has_dumped:
                    self.hung_up.append(not line)
                    has_dumped = False
                if not line:
                    return
                if line.startswith(b"lru_crawler"):
                    has_dumped = True
                    with contextlib.suppress(OSError):
                        for start in range(0, DUMPED, 1000):
                            # The warmest first: the second pass has enough before the end, too.
                            connection.sendall(b"".join(LINE % (i, DUMPED - i) for i in range(start, start + 1000)))
                        connection.sendall(b"END\r\n")
                elif not line.startswith(b"delete"):
                    connection.sendall(self._answer(line.split()))

    def _answer(self, words: list[bytes]) -> bytes:
        slabs = {"chunks_per_page": 1024, "total_pages": 30, "free_chunks": 0, "used_chunks": ITEMS}
        stats = {
            (b"stats",): {"curr_items": self.count},
            (b"stats", b"slabs"): {**{f"1:{name}": n for name, n in slabs.items()}, "total_malloced": 30 * MIB},
            (b"stats", b"items"): {"items:1:number": ITEMS, "items:1:number_cold": ITEMS},
        }.get(tuple(words))
        if stats is None:
            return b"VERSION 1.6.18\r\n" if words == [b"version"] else b"ERROR\r\n"
        return "".join(f"STAT {name} {value}\r\n" for name, value in stats.items()).encode() + b"END\r\n"


@contextlib.contextmanager
def dumping(count: int) -> Iterator[tuple[Dumping, MemcachedClient]]:
    server = Dumping(count)
    client = MemcachedClient("127.0.0.1", server.port)
    try:
        yield server, client
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize(("count", "hangs_up"), [(ITEMS, False), (100 * ITEMS, True)])
def test_what_is_left_of_a_dump_is_read_unless_it_is_much(count: int, hangs_up: bool) -> None:
    with dumping(count) as (server, client):
        deleter = MemcachedClient("127.0.0.1", server.port)
        delete_coldest(client, deleter, 20, True, Deadline(60))
        deleter.close()
        client.stats()
        while len(server.hung_up) < 2:
            pass
    assert server.hung_up == [hangs_up, hangs_up], "in both passes"


def test_a_deadline_in_a_dump_hangs_up_no_sooner() -> None:
    with dumping(ITEMS) as (server, client):
        with pytest.raises(ApplicationError, match="the deadline passed"):
            list(_dump(client, True, Deadline(0.0)))
        assert client.stats() == {"curr_items": str(ITEMS)}
        assert server.hung_up == [False]

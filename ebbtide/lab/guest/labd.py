"""Answers a lab's own questions inside a lab guest, apart from all agents.

JSON lines over the virtio-serial port `io.ebbtide.lab.0`: `{"id", "op", ...}` in,
`{"id", "ok", "result" | "error"}` out. A line is at most 65536 bytes. Standard library only; modules that only one
operation needs are imported there, since every import costs boot time in an emulated guest.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

PORT_NAME = "io.ebbtide.lab.0"
MEMCACHED = ("127.0.0.1", 11211)
LINE_BYTES = 65536
READ_BYTES = 48 * 1024
OUTPUT_BYTES = 24 * 1024
BATCH_BYTES = 256 * 1024


class LabdError(Exception):
    """A request that cannot be answered; its text goes to the caller."""


def value_of(key: str, value_bytes: int) -> bytes:
    """The value that `memcached.fill` stores under a key: its SHA-256 in hex, repeated to `value_bytes`."""
    digest = hashlib.sha256(key.encode()).hexdigest().encode()
    return (digest * (value_bytes // len(digest) + 1))[:value_bytes]


class Memcached:
    """The text protocol of memcached over one connection."""

    def __init__(self) -> None:
        self._socket = socket.create_connection(MEMCACHED, timeout=60)
        self._reader = self._socket.makefile("rb")

    def __enter__(self) -> Memcached:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._socket.close()

    def _line(self) -> bytes:
        line = self._reader.readline()
        if not line.endswith(b"\r\n"):
            raise LabdError("memcached closed the connection")
        return line[:-2]

    def stats(self, args: str = "") -> dict[str, str]:
        self._socket.sendall(f"stats {args}".strip().encode() + b"\r\n")
        found: dict[str, str] = {}
        while True:
            line = self._line()
            if line == b"END":
                return found
            words = line.decode("utf-8", "replace").split(" ", 2)
            if words[0] != "STAT" or len(words) != 3:
                raise LabdError(f"memcached answered: {line.decode('utf-8', 'replace')}")
            found[words[1]] = words[2]

    def fill(self, prefix: str, first: int, count: int, value_bytes: int) -> int:
        """Store keys prefix+first ... and return how many items memcached says it stored."""
        before = int(self.stats()["total_items"])
        batch = bytearray()
        for index in range(first, first + count):
            key = f"{prefix}{index}"
            batch += b"set %s 0 0 %d noreply\r\n" % (key.encode(), value_bytes)
            batch += value_of(key, value_bytes) + b"\r\n"
            if len(batch) >= BATCH_BYTES:
                self._socket.sendall(batch)
                batch.clear()
        self._socket.sendall(batch)
        return int(self.stats()["total_items"]) - before

    def digests(self, keys: list[str]) -> dict[str, str]:
        """SHA-256 of the value of each key that is found."""
        found = {}
        for first in range(0, len(keys), 100):
            self._socket.sendall(b"get " + " ".join(keys[first : first + 100]).encode() + b"\r\n")
            while True:
                line = self._line()
                if line == b"END":
                    break
                words = line.split(b" ")
                if words[0] != b"VALUE":
                    raise LabdError(f"memcached answered: {line.decode('utf-8', 'replace')}")
                data = self._reader.read(int(words[3]) + 2)
                found[words[1].decode()] = hashlib.sha256(data[:-2]).hexdigest()
        return found


def processes(name: str) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/comm") as comm:
                    if comm.read().strip() == name:
                        yield int(entry)
            except OSError:
                continue  # it ended meanwhile


def field(request: dict[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    value = request.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise LabdError(f"field {name} is missing or of the wrong type")
    return value


def check_key(name: str, key: str) -> str:
    """Refuse what would break the text protocol (memcached doc/protocol.txt: keys)."""
    if not key or len(key) > 230 or any(ord(letter) <= 32 or ord(letter) > 126 for letter in key):
        raise LabdError(f"field {name} must be printable ASCII without blanks, at most 230 letters")
    return key


def ping(request: dict[str, Any]) -> dict[str, Any]:
    with open("/proc/uptime") as uptime, open("/proc/sys/kernel/random/boot_id") as boot_id:
        return {
            "nonce": request.get("nonce"),
            "uptime_s": float(uptime.read().split()[0]),
            "boot_id": boot_id.read().strip(),
        }


def read(request: dict[str, Any]) -> dict[str, Any]:
    with open(field(request, "path", str), "rb") as file:
        return {"text": file.read(READ_BYTES).decode("utf-8", "replace")}


def memcached_fill(request: dict[str, Any]) -> dict[str, Any]:
    prefix = check_key("prefix", field(request, "prefix", str))
    count, value_bytes, first = (
        field(request, name, int, default) for name, default in (("count", None), ("value_bytes", None), ("start", 0))
    )
    if min(count, value_bytes, first) < 0:
        raise LabdError("fields count, value_bytes and start must not be negative")
    begin_s = time.monotonic()
    with Memcached() as memcached:
        stored = memcached.fill(prefix, first, count, value_bytes)
    return {"stored": stored, "seconds": time.monotonic() - begin_s}


def memcached_get(request: dict[str, Any]) -> dict[str, Any]:
    keys = [check_key("keys", field({"keys": key}, "keys", str)) for key in field(request, "keys", list)]
    with Memcached() as memcached:
        return {"found": memcached.digests(keys)}


def memcached_stats(request: dict[str, Any]) -> dict[str, Any]:
    args = field(request, "args", str, "")
    if args not in ("", "slabs", "settings", "items"):
        raise LabdError("field args must be empty, slabs, settings or items")
    with Memcached() as memcached:
        return dict(memcached.stats(args))


def rss(request: dict[str, Any]) -> dict[str, Any]:
    name = field(request, "name", str)
    for pid in processes(name):
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("VmRSS:"):
                    return {"pid": pid, "rss_mib": int(line.split()[1]) / 1024}
    raise LabdError(f"no process is called {name}")


def execute(request: dict[str, Any]) -> dict[str, Any]:
    import subprocess

    argv = field(request, "argv", list)
    timeout_s = field(request, "timeout_s", (int, float), 10)
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise LabdError(f"{argv[0]} took longer than {timeout_s} s") from error
    return {
        "returncode": done.returncode,
        "stdout": done.stdout[:OUTPUT_BYTES].decode("utf-8", "replace"),
        "stderr": done.stderr[:OUTPUT_BYTES].decode("utf-8", "replace"),
    }


OPERATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ping": ping,
    "read": read,
    "memcached.fill": memcached_fill,
    "memcached.get": memcached_get,
    "memcached.stats": memcached_stats,
    "rss": rss,
    "exec": execute,
}


def answer(line: bytes) -> bytes | None:
    """The reply line to one request line; None where it is none (the newline that resynchronises)."""
    try:
        request = json.loads(line)
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    reply: dict[str, Any] = {"id": request.get("id")}
    try:
        operation = OPERATIONS.get(str(request.get("op")))
        if operation is None:
            raise LabdError(f"unknown op {request.get('op')}")
        reply.update(ok=True, result=operation(request))
    except Exception as error:  # whatever it is, the caller must hear of it
        reply.update(ok=False, error=f"{type(error).__name__}: {error}")
    text = json.dumps(reply).encode() + b"\n"
    if len(text) > LINE_BYTES:
        text = (
            json.dumps({"id": reply["id"], "ok": False, "error": "the answer is longer than a line"}).encode() + b"\n"
        )
    return text


def find_port(name: str, classes: str = "/sys/class/virtio-ports") -> str:
    """Device of a virtio-serial port; without udev only sysfs knows the names."""
    while True:
        for entry in os.listdir(classes) if os.path.isdir(classes) else []:
            with open(f"{classes}/{entry}/name") as file:
                if file.read().strip() == name:
                    return f"/dev/{entry}"
        time.sleep(0.2)


def send(port: int, data: bytes, limit_s: float = 10.0) -> None:
    """Write to the port, or drop the reply when it is not read."""
    deadline_s = time.monotonic() + limit_s
    while data and time.monotonic() < deadline_s:
        try:
            data = data[os.write(port, data) :]
        except BlockingIOError:
            select.select([], [port], [], 0.2)


def serve(port: int) -> None:
    buffer = b""
    while True:
        select.select([port], [], [], 5.0)
        try:
            data = os.read(port, LINE_BYTES)
        except BlockingIOError:
            continue
        if not data:
            buffer = b""
            time.sleep(0.1)  # the host has closed its end: the port is always readable then
            continue
        *lines, buffer = (buffer + data).split(b"\n")
        if len(buffer) > LINE_BYTES:
            buffer = b""
        for line in lines:
            reply = answer(line)
            if reply is not None:
                send(port, reply)


def main() -> int:
    serve(os.open(find_port(PORT_NAME), os.O_RDWR | os.O_NONBLOCK))
    return 0


if __name__ == "__main__":
    sys.exit(main())

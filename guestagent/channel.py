"""The port to the host: lines in, lines out, never more than the protocol allows and never blocking."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections import deque
from typing import Callable

from guestagent.errors import GuestAgentError

PORT_NAME = "io.ebbtide.guest.0"
LINE_BYTES = 65536  # with the newline
MESSAGES_PER_S = 20
QUEUED_LINES = 64
# A line that the host does not take within this time is given up; the next one starts on a line of its own.
WRITE_LIMIT_S = 5.0
READ_BYTES = 16384


class PortNotFound(GuestAgentError):
    """The port is not there (yet)."""


def find_port(port: str, sysfs: str = "/sys", dev: str = "/dev") -> str:
    """Path of a port given by path or by virtio-serial name.

    Guests without udev have no `/dev/virtio-ports`, so names are looked up in sysfs (Linux: virtio_console).

    Raises: PortNotFound.
    """
    if "/" in port:
        if not os.path.exists(port):
            raise PortNotFound(f"{port} does not exist")
        return port
    ports = os.path.join(sysfs, "class", "virtio-ports")
    try:
        entries = sorted(os.listdir(ports))
    except OSError:
        raise PortNotFound(f"no virtio-serial ports in {ports}; is virtio_console loaded?") from None
    for entry in entries:
        try:
            with open(os.path.join(ports, entry, "name")) as file:
                name = file.read().strip()
        except OSError:
            continue
        if name == port:
            return os.path.join(dev, entry)
    raise PortNotFound(f"no virtio-serial port is named {port}")


class LineReader:
    """Cuts bytes into lines. A line longer than the limit comes out once, as None, and is skipped to its end."""

    def __init__(self, limit: int = LINE_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes | None]:
        """Lines without their newline, in order; empty lines are dropped."""
        lines: list[bytes | None] = []
        self._buffer += data
        start = 0
        while True:
            end = self._buffer.find(b"\n", start)
            if end < 0:
                break
            if self._skipping:
                self._skipping = False
            elif end - start >= self._limit:
                lines.append(None)
            else:
                line = bytes(self._buffer[start:end]).strip()
                if line:
                    lines.append(line)
            start = end + 1
        del self._buffer[:start]
        if len(self._buffer) >= self._limit:
            if not self._skipping:
                lines.append(None)
            self._skipping = True
            self._buffer.clear()
        return lines


class RateLimit:
    """At most `count` events in any `window_s` seconds."""

    def __init__(self, count: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._window_s = window_s
        self._clock = clock
        self._times: deque[float] = deque()

    def delay_s(self) -> float:
        """Seconds until the next event is allowed."""
        if len(self._times) < self._count:
            return 0.0
        return max(0.0, self._times[0] + self._window_s - self._clock())

    def count(self) -> None:
        """Count an event now."""
        if len(self._times) == self._count:
            self._times.popleft()
        self._times.append(self._clock())


class Channel:
    """One open port. `lines()` and `flush()` never block; `queue()` drops what the host does not take.

    `path` may be a character device or, for tests without a virtio device, a unix socket.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
        self._fd = _connect(path) if self.is_socket else os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)
        self._clock = clock
        self._reader = LineReader()
        self._limit = RateLimit(MESSAGES_PER_S, 1.0, clock)
        self._lines: deque[bytes] = deque()
        self._sending = b""  # rest of a line that was begun
        self._sending_since = 0.0
        self._torn = False

    def fileno(self) -> int:
        """File descriptor, for poll()."""
        return self._fd

    def close(self) -> None:
        """Close the port."""
        os.close(self._fd)

    def lines(self) -> list[bytes | None] | None:
        """Complete lines that have arrived (None in the list: one that was too long); None when the host is gone.

        Raises: OSError where the port is gone.
        """
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            if error.errno in (errno.EIO, errno.ECONNRESET):  # not ENODEV: the port itself is gone, for ever
                return None
            raise
        return self._reader.feed(data) if data else None

    def queue(self, line: bytes) -> bool:
        """Take a line (without newline) for sending; False when the queue is full and the line was dropped."""
        if len(self._lines) >= QUEUED_LINES:
            return False
        self._lines.append(line + b"\n")
        return True

    def forget(self) -> None:
        """Drop all that was not sent: it belongs to an earlier conversation."""
        self._lines.clear()
        self._tear()

    def wait_s(self) -> float | None:
        """Seconds until there may be something to write: 0 = now, None = nothing queued."""
        if self._sending:
            return 0.0
        return self._limit.delay_s() if self._lines else None

    def flush(self) -> None:
        """Write as much as the port takes now. Raises: OSError where the port is gone."""
        while self.wait_s() == 0.0:
            if not self._sending:
                line = self._lines.popleft()
                self._sending = b"\n" + line if self._torn else line
                self._torn = False
                self._sending_since = self._clock()
                self._limit.count()
            try:
                sent = os.write(self._fd, self._sending)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO, errno.ECONNRESET):
                    raise
                self.forget()
                return
            self._sending = self._sending[sent:]
            if not self._sending:
                continue
            if sent == 0:
                if self._clock() - self._sending_since > WRITE_LIMIT_S:
                    self.forget()
                return

    def _tear(self) -> None:
        if self._sending:
            self._torn = True
            self._sending = b""


def _connect(path: str) -> int:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        connection.setblocking(False)
        return connection.detach()


def poll_events(channel: Channel) -> int:
    """Events to wait for: input always, output where a write is due."""
    return select.POLLIN | (select.POLLOUT if channel.wait_s() == 0.0 else 0)

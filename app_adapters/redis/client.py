"""A client of the Redis protocol, RESP2 and RESP3 (redis.io: Redis serialization protocol specification)."""

from __future__ import annotations

import socket
from typing import Any, Union

from app_adapters.errors import ApplicationError

CHUNK_BYTES = 65536
# Nothing that an operator asks for is longer; a server may say anything.
REPLY_BYTES = 16 * 1024 * 1024
DEPTH = 8

Word = Union[str, int, bytes]


class ServerError(ApplicationError):
    """The server answered with an error; `code` is its first word, such as NOAUTH."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.partition(" ")[0]


class Incomplete(Exception):
    """The rest of a reply has still to come."""


def command(*words: Word) -> bytes:
    """A command as the protocol wants it: an array of byte strings."""
    encoded = [word if isinstance(word, bytes) else str(word).encode("utf-8") for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)


def parse(data: bytes, at: int = 0, depth: int = 0) -> tuple[Any, int]:
    """The reply that begins at `at`, and where it ends. Text is str, an error a ServerError that is returned.

    Attributes (RESP3) are skipped. Pushed messages come as lists; who subscribes to nothing gets none.

    Raises: Incomplete, ValueError for what is no reply.
    """
    end = data.find(b"\r\n", at)
    if end < 0:
        raise Incomplete
    if depth > DEPTH:
        raise ValueError("nested too deeply")
    kind, rest, at = data[at : at + 1], data[at + 1 : end], end + 2
    if kind == b"+":
        return rest.decode("utf-8", "replace"), at
    if kind == b"-":
        return ServerError(rest.decode("utf-8", "replace")), at
    if kind in (b":", b"("):
        return int(rest), at
    if kind == b",":
        return float(rest), at
    if kind == b"_":
        return None, at
    if kind == b"#":
        return rest == b"t", at
    if kind in (b"$", b"=", b"!"):
        return _blob(kind, data, at, int(rest))
    if kind in (b"*", b"~", b">"):
        if int(rest) < 0:
            return None, at
        return _items(data, at, int(rest), depth)
    if kind in (b"%", b"|"):
        flat, at = _items(data, at, 2 * int(rest), depth)
        if kind == b"|":
            return parse(data, at, depth + 1)
        return {str(name): value for name, value in zip(flat[::2], flat[1::2])}, at
    raise ValueError(f"a reply begins with {kind!r}")


def _blob(kind: bytes, data: bytes, at: int, length: int) -> tuple[Any, int]:
    if length < 0:
        return None, at
    if length > REPLY_BYTES:
        raise ValueError(f"a string of {length} bytes")
    if len(data) < at + length + 2:
        raise Incomplete
    text = data[at : at + length].decode("utf-8", "replace")
    at += length + 2
    if kind == b"!":
        return ServerError(text), at
    return (text[4:] if kind == b"=" else text), at  # a verbatim string begins with its format, such as `txt:`


def _items(data: bytes, at: int, count: int, depth: int) -> tuple[list[Any], int]:
    found = []
    for _ in range(count):
        item, at = parse(data, at, depth + 1)
        found.append(item)
    return found, at


class RedisClient:
    """One connection, made when it is first needed. Not for several threads.

    `address` is (host, port), or the path of a socket. Every method raises ApplicationError where the server cannot be
    reached, and ServerError (one of them) where it answers with an error.
    """

    def __init__(
        self,
        address: tuple[str, int] | str,
        user: str = "",
        password: str = "",
        timeout_s: float = 5.0,
        protocol: int = 2,
    ) -> None:
        self._address = address
        self._user = user
        self._password = password
        self._timeout_s = timeout_s
        self._protocol = protocol
        self._socket: socket.socket | None = None
        self._buffer = b""

    def close(self) -> None:
        """Close the connection; the next call makes a new one."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._buffer = None, b""

    def __enter__(self) -> RedisClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, *words: Word) -> Any:
        """The reply to a command."""
        if self._socket is None:
            self._connect()
        return self._exchange(*words)

    def info(self) -> dict[str, str]:
        """All fields of INFO. Those of a keyspace are named as there, `db0` and so on."""
        text = self.call("INFO")
        if not isinstance(text, str):
            raise ApplicationError("INFO was answered with something else")
        pairs = (line.partition(":") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: value for name, _, value in pairs}

    def config_get(self, name: str) -> str | None:
        """A setting, None where the server has none of this name."""
        reply = self.call("CONFIG", "GET", name)
        if isinstance(reply, list):
            reply = {str(key): value for key, value in zip(reply[::2], reply[1::2])}
        if not isinstance(reply, dict):
            raise ApplicationError(f"CONFIG GET {name} was answered with something else")
        value = reply.get(name)
        return None if value is None else str(value)

    def config_set(self, name: str, value: Word) -> None:
        """Change a setting of the running server; its configuration file is left alone."""
        self.call("CONFIG", "SET", name, value)

    def _connect(self) -> None:
        try:
            if isinstance(self._address, str):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(self._timeout_s)
                self._socket.connect(self._address)
            else:
                self._socket = socket.create_connection(self._address, self._timeout_s)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise self._lost(error) from None
        try:
            if self._password:
                self._exchange("AUTH", *([self._user] if self._user else []), self._password)
            if self._protocol != 2:
                self._exchange("HELLO", self._protocol)
        except ApplicationError:
            self.close()
            raise

    def _exchange(self, *words: Word) -> Any:
        try:
            assert self._socket is not None
            self._socket.sendall(command(*words))
            while True:
                try:
                    reply, end = parse(self._buffer)
                    break
                except Incomplete:
                    self._receive()
        except OSError as error:
            raise self._lost(error) from None
        except ValueError as error:
            self.close()  # the rest of such an answer would be taken for the next one
            raise ApplicationError(f"{words[0]!s} was answered with what is not the Redis protocol: {error}") from None
        self._buffer = self._buffer[end:]
        if isinstance(reply, ServerError):
            raise reply
        return reply

    def _receive(self) -> None:
        assert self._socket is not None
        if len(self._buffer) > REPLY_BYTES:
            raise ValueError("too long an answer")
        data = self._socket.recv(CHUNK_BYTES)
        if not data:
            raise ConnectionError("it closed the connection")
        self._buffer += data

    def _lost(self, error: OSError) -> ApplicationError:
        self.close()
        place = self._address if isinstance(self._address, str) else f"{self._address[0]}:{self._address[1]}"
        return ApplicationError(f"the server at {place} cannot be reached: {error}")

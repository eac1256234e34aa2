"""Client of the lab channel, by which tests and the demo act inside a guest, apart from all agents."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import secrets
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from ebbtide.lab.errors import ChannelOperationFailed, LinkError

PORT_NAME = "io.ebbtide.lab.0"
LINE_BYTES = 65536


class LabLink:
    """One conversation with `labd` in a guest. Calls are answered in turn; close it before another client connects.

    QEMU serves one client of a port at a time and lets others wait without a word.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()

    @classmethod
    async def connect(cls, path: Path | str, timeout_s: float = 30.0) -> LabLink:
        """Connect to the channel's Unix socket and wait until the guest answers, which may still be booting.

        Raises LinkError when it does not within timeout_s.
        """
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(timeout_s):
                # By its directory: in a lab's own folders the path may be longer than a socket's may be (unix(7)).
                directory = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    short = f"/proc/self/fd/{directory}/{Path(path).name}"
                    reader, writer = await asyncio.open_unix_connection(short, limit=2 * LINE_BYTES)
                finally:
                    os.close(directory)
                link = cls(reader, writer)
                nonce, wait_s = secrets.token_hex(8), 0.5
                while not await link._answers(nonce, wait_s):
                    # A slow guest is not asked faster than it answers.
                    wait_s *= 2
        except (OSError, TimeoutError) as error:
            if writer is not None:
                writer.close()
            raise LinkError(f"the guest behind {path} did not answer within {timeout_s:g} s") from error
        except BaseException:
            if writer is not None:
                writer.close()
            raise
        return link

    async def call(self, op: str, *, reply_timeout_s: float = 120.0, **parameters: Any) -> dict[str, Any]:
        """Run one operation in the guest and return its result.

        Raises ChannelOperationFailed when the guest says so, LinkError when it does not answer in reply_timeout_s.
        """
        async with self._turn:
            number = self._send(op, parameters)
            try:
                async with asyncio.timeout(reply_timeout_s):
                    reply = await self._reply(number)
            except TimeoutError as error:
                raise LinkError(f"{op}: no answer within {reply_timeout_s:g} s") from error
        if reply.get("ok") is not True:
            raise ChannelOperationFailed(f"{op}: {reply.get('error')}")
        result: dict[str, Any] = reply["result"]
        return result

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):  # the guest may be gone already
            await self._writer.wait_closed()

    async def __aenter__(self) -> LabLink:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _answers(self, nonce: str, wait_s: float) -> bool:
        """Whether one of this conversation's pings, the first ones too, is answered within wait_s."""
        self._send("ping", {"nonce": nonce})
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    reply = await self._line()
                    if reply.get("ok") is True and reply["result"].get("nonce") == nonce:
                        return True
        except TimeoutError:
            return False

    def _send(self, op: str, parameters: dict[str, Any]) -> int:
        number = next(self._numbers)
        # The newline before ends whatever an earlier conversation left in the guest's buffer.
        line = b"\n" + json.dumps({"id": number, "op": op, **parameters}).encode() + b"\n"
        if len(line) > LINE_BYTES:
            raise LinkError(f"{op}: the request is longer than a line of {LINE_BYTES} bytes")
        self._writer.write(line)
        return number

    async def _reply(self, number: int) -> dict[str, Any]:
        """The answer to request `number`; what was meant for earlier ones is dropped."""
        while True:
            reply = await self._line()
            if reply.get("id") == number:
                return reply

    async def _line(self) -> dict[str, Any]:
        """The next answer, whichever it is to."""
        while True:
            try:
                line = await self._reader.readline()
            except ValueError as error:
                raise LinkError("the guest sent more than a line may hold") from error
            except OSError as error:
                raise LinkError(f"the channel was cut: {error.strerror or error}") from error
            if not line:
                raise LinkError("the channel was closed by QEMU: the guest is gone")
            try:
                reply = json.loads(line)
            except ValueError:
                continue
            if isinstance(reply, dict):
                return reply


def channel_path(domain_xml: str, name: str = PORT_NAME) -> Path:
    """Path of a channel's Unix socket out of the XML of a running domain. Raises LinkError when there is none."""
    for channel in ElementTree.fromstring(domain_xml).iterfind("./devices/channel"):
        target, source = channel.find("target"), channel.find("source")
        if target is not None and target.get("name") == name:
            path = source.get("path") if source is not None else None
            if path:
                return Path(path)
    raise LinkError(f"the domain has no channel {name}, or does not run")


def value_digest(key: str, value_bytes: int) -> str:
    """SHA-256 of the value that `memcached.fill` stores under a key (see `ebbtide/lab/guest/labd.py`)."""
    digest = hashlib.sha256(key.encode()).hexdigest().encode()
    return hashlib.sha256((digest * (value_bytes // len(digest) + 1))[:value_bytes]).hexdigest()

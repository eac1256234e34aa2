"""The agent's end of a guest's channel: JSON-RPC 2.0 over the virtio-serial port (docs/internals/protocols.md).

The guest is untrusted: lines are limited and cleaned, messages that answer nothing are counted, answers are checked
against their schema, and what does not follow the protocol ends the conversation. Writes never wait for a guest that
does not read. What a guest says unasked is counted and held to its schema, too.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
from pydantic import ValidationError

from ebbtide.messages.guest import (
    MAX_LINE,
    NOTICES,
    PROTOCOL,
    CpusSet,
    GuestBody,
    GuestStatus,
    Hello,
    MemoryState,
    Notice,
    cleaned,
)
from ebbtide.tracing.context import HEADER, TraceContext
from ebbtide.tracing.spans import Kind, span
from hostagent.errors import GuestRefused, GuestSilent, GuestUnreachable, HypervisorError
from hostagent.vm.guest_spans import record_guest

MESSAGES_PER_S: Final = 20
#: The error of a guest agent that has had no hello (docs/internals/protocols.md).
HELLO_FIRST: Final = -32002
#: That of one that does not know a method, and never will.
UNKNOWN_METHOD: Final = -32601
#: How long one hello is waited for: a guest that boots answers the one that waits in its channel.
HELLO_LIMIT_S: Final = 10.0
#: Between two conversations, in seconds; doubled, up to the second figure, by each one in which the guest broke the
#: rules, until one has lasted as long as that.
RETRY_S: Final = 2.0
LONGEST_RETRY_S: Final = 60.0
#: So soon after its hello, in seconds, no agent is started again that is not started again all the time.
EARLY_S: Final = 5.0
#: Bytes that may wait for a guest that does not read.
WRITE_BACKLOG: Final = 4 * MAX_LINE
#: What people are told of a guest whose agent is not connected, before the reason.
SILENT: Final = "the guest agent is not connected"

Answer = TypeVar("Answer", bound=GuestBody)
log = structlog.get_logger()


@dataclass(slots=True)
class RetryPace:
    """How soon a conversation is begun again: each costs lines of the log, which a guest is not to fill."""

    pause_s: float = field(default_factory=lambda: RETRY_S)

    def ended(self, lasted_s: float, broken: bool) -> float:
        """A conversation has ended.

        :param lasted_s: since its hello; 0 where there was none.
        :param broken: whether the guest broke the rules in it.
        :returns: in how many seconds the next one begins.
        """
        pause_s = RETRY_S if lasted_s >= LONGEST_RETRY_S else self.pause_s
        self.pause_s = min(2 * pause_s, LONGEST_RETRY_S) if broken else pause_s
        return pause_s


class GuestLink:
    """A conversation with one guest that is opened again whenever it breaks.

    :param find_channel: gives the path of the channel's socket, None while there is none.
    :param on_hello: called after each successful hello: the guest has booted, or the agent has.
    :param on_notice: called with each notification that fits its schema. It must not block: nothing else is heard of
        the guest meanwhile.
    """

    def __init__(
        self,
        vm: str,
        find_channel: Callable[[], Awaitable[Path | None]],
        on_hello: Callable[[Hello], None],
        *,
        on_notice: Callable[[Notice], None] = lambda notice: None,
    ) -> None:
        self._vm = vm
        self._find_channel = find_channel
        self._on_hello = on_hello
        self._on_notice = on_notice
        #: Goes to the guest through the channel and is known nowhere else.
        self._token = secrets.token_urlsafe(24)
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        #: What takes the guest's part of a trace, by the call whose answer brings it.
        self._traced: dict[str, Callable[[Any], None]] = {}
        self._number = 0
        #: Whether the domain has a channel at all: without one no agent will ever answer.
        self.has_channel = True
        #: Set while the guest answers; a call that runs into its time limit clears it until the next hello.
        self.connected = False
        self._greeted = False
        #: Why it is not connected, with "it" for the agent; empty: it is, or has not been tried yet.
        self.why = ""
        self._why_logged = ""
        #: What ended the conversation, where the guest did.
        self._ended = ""
        #: Messages that answered nothing and were no notification of this protocol.
        self.dropped = 0
        #: CPUs on line by the guest's last word, however old; None: it never said.
        self.online: frozenset[int] | None = None
        #: The request id of the notice of preemption that the guest has by its last word; empty: none, or not known.
        self.notice = ""
        self._broken = asyncio.Event()
        self.retry = RetryPace()
        #: Of this conversation: which boot said hello and when, and whether the guest broke the rules.
        self.boot_id = ""
        self._greeted_at: float | None = None
        self._rules_broken = False
        self._log = log.bind(vm=vm)

    async def run(self) -> None:
        """Keep the conversation up until cancelled."""
        # It outlives the operation that began it, which later lines of the log are not to name.
        structlog.contextvars.clear_contextvars()
        while True:
            self._greeted_at, self._rules_broken = None, False
            try:
                path = await self._find_channel()
                self.has_channel = path is not None
                if path is None:
                    raise GuestUnreachable("its domain has no channel for one")
                await self._converse(path)
            except (GuestUnreachable, HypervisorError, OSError) as error:
                # A hypervisor that does not say where the channel is may say so the next time.
                self.why = str(error)
            self.connected = False
            if self.why != self._why_logged:
                self._why_logged = self.why
                self._log.info(SILENT, why=self.why)
            await asyncio.sleep(self.retry.ended(self._lasted_s(), self._rules_broken))

    @property
    def may_come_back(self) -> bool:
        """Whether an agent has said hello before, so that one that does not answer now is probably started again."""
        return self.has_channel and self._greeted

    @property
    def silence(self) -> str:
        """That the guest agent is not connected, and why, as far as it is known."""
        return f"{SILENT}: {self.why}" if self.why else SILENT

    def hang_up(self, why: str = "its guest boots") -> None:
        """Begin anew with a hello: nobody in the guest knows of this conversation any more, or goes on with it."""
        self._broken.set()
        self.connected, self.why = False, why

    async def call(
        self, method: str, params: Mapping[str, Any], answer: type[Answer], limit_s: float, breaks: bool = True
    ) -> Answer:
        """Call a method of the guest.

        :param breaks: whether a guest that does not answer in time counts as silent. Not for who calls beside an
            operation on the VM, which the guest may be busy with.
        :raises GuestSilent: it was sent, and not answered within ``limit_s`` or before the conversation ended.
        :raises GuestUnreachable: that, not connected, or an answer that breaks the protocol.
        :raises GuestRefused: the guest answered with an error.
        """
        if not self.connected:
            raise GuestUnreachable(f"the guest agent of {self._vm} is not connected")
        try:
            with span(f"call {method}", Kind.CLIENT, vm=self._vm) as one:
                said = _checked(answer, await self._exchange(method, params, limit_s, one.context))
        except TimeoutError:
            if breaks:
                # A breaker: no further call waits for a guest that does not answer; the next hello closes it again.
                self.hang_up(f"it did not answer {method} in {limit_s:.1f} s")
            raise GuestSilent(f"the guest agent of {self._vm} did not answer {method} in {limit_s:.1f} s") from None
        if isinstance(said, MemoryState) and self._is_of_another_boot(said):
            raise GuestUnreachable(f"the guest agent of {self._vm} speaks for another boot than at its hello")
        if isinstance(said, GuestStatus | CpusSet):
            self.online = frozenset(said.cpus.online if isinstance(said, GuestStatus) else said.online)
        if isinstance(said, GuestStatus):
            self.notice = said.notice
        return said

    def _lasted_s(self) -> float:
        """How long ago this conversation's hello was; 0 where there was none."""
        return time.monotonic() - self._greeted_at if self._greeted_at is not None else 0.0

    async def _converse(self, path: Path) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_LINE)
        except OSError as error:
            raise GuestUnreachable(f"its channel cannot be opened: {error.strerror or error}") from error
        self._writer = writer
        self._broken.clear()
        self._ended = ""
        reading = asyncio.create_task(self._read_lines(reader), name=f"guest-lines:{self._vm}")
        broken = asyncio.create_task(self._broken.wait(), name=f"guest-breaker:{self._vm}")
        try:
            await self._say_hello()
            self._log.info("the guest agent answers")
            await asyncio.wait({broken, reading}, return_when=asyncio.FIRST_COMPLETED)
            raise GuestUnreachable(self.why or self._ended or "the conversation broke off")
        finally:
            self.connected = False
            self._writer = None
            for task in (reading, broken):
                task.cancel()
            await asyncio.gather(reading, broken, return_exceptions=True)
            writer.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(GuestSilent(f"the conversation with {self._vm} broke off"))
            self._waiting.clear()

    async def _say_hello(self) -> None:
        nonce = secrets.token_hex(8)
        assert self._writer is not None
        self._writer.write(b"\n")
        params = {"protocol": PROTOCOL, "nonce": nonce, "vm": self._vm, "token": self._token}
        try:
            hello = _checked(Hello, await self._exchange("hello", params, HELLO_LIMIT_S))
        except TimeoutError:
            raise GuestUnreachable(self._ended or f"no hello within {HELLO_LIMIT_S:g} s") from None
        except GuestRefused as error:
            # An agent has no reason to. Its words may be others each time, and each is a line of the log.
            self._rules_broken = True
            raise GuestUnreachable(f"it refused hello: {error}") from error
        if hello.nonce != nonce or hello.protocol != PROTOCOL:
            raise GuestUnreachable("it answered hello with another nonce or protocol")
        self.connected = self._greeted = True
        self.why = self._why_logged = self.notice = ""
        self.boot_id, self._greeted_at = hello.boot_id, time.monotonic()
        self._on_hello(hello)

    async def _exchange(
        self, method: str, params: Mapping[str, Any], limit_s: float, above: TraceContext | None = None
    ) -> Any:
        """A call and its answer; the guest's part of it stands beneath the span `above`."""
        writer = self._writer
        if writer is None or writer.transport.get_write_buffer_size() > WRITE_BACKLOG:
            raise GuestUnreachable(f"the guest agent of {self._vm} does not read")
        self._number += 1
        # The random part keeps answers of an earlier conversation apart from ours.
        number = f"{self._number}-{secrets.token_hex(4)}"
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        if above is not None:
            context = above.child()
            message[HEADER] = context.header()
            self._traced[number] = partial(record_guest, self._vm, method, above, context, time.time_ns())
        line = json.dumps(message).encode() + b"\n"
        try:
            writer.write(line)
            async with asyncio.timeout(limit_s):
                return await future
        finally:
            self._waiting.pop(number, None)
            self._traced.pop(number, None)
            future.cancel()

    async def _read_lines(self, reader: asyncio.StreamReader) -> None:
        """Hand answers to those who wait. Ends when the guest hangs up, floods or sends a line that is too long."""
        #: When the unasked messages of the last second came, and their bytes.
        arrivals: deque[tuple[float, int]] = deque()
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError:
                self._ended = "it closed its end of the channel"
                return
            except asyncio.LimitOverrunError:
                self._ended, self._rules_broken = "it sent a line of more than 64 KiB", True
                self._log.warning("the guest sent a line of more than 64 KiB; the conversation starts again")
                return
            message = _parsed(line)
            if self._answers(message):
                continue
            now = time.monotonic()
            arrivals.append((now, len(line)))
            while now - arrivals[0][0] >= 1.0:
                arrivals.popleft()
            if len(arrivals) > MESSAGES_PER_S or sum(size for _, size in arrivals) > MAX_LINE:
                self._ended, self._rules_broken = "it sent more than 20 unasked messages, or 64 KiB, in a second", True
                self._log.warning("the guest sends more than 20 unasked messages, or 64 KiB, a second; start again")
                return
            if not self._notice(message):
                self.dropped += 1

    def _answers(self, message: Mapping[str, Any]) -> bool:
        """Hand an answer to the call that waits for it; False if there is none."""
        number = message.get("id")
        if not isinstance(number, str):
            return False
        future = self._waiting.get(number)
        if future is None or future.done() or not (message := _cleaned(message)):
            return False
        if (take := self._traced.pop(number, None)) is not None and "trace" in message:
            take(message["trace"])
        if isinstance(error := message.get("error"), dict):
            code = error.get("code")
            if code == HELLO_FIRST:
                # QEMU keeps the channel open when the guest agent is started again: only this tells that it was.
                self._rules_broken = self._rules_broken or self._lasted_s() < EARLY_S
                self.hang_up("it was started again")
            said = str(error.get("message", "no reason given"))[:300]
            future.set_exception(GuestRefused(said, code if isinstance(code, int) else None))
        else:
            future.set_result(message.get("result"))
        return True

    def _notice(self, message: Mapping[str, Any]) -> bool:
        """Hand on a notification; False if it is none, or comes before this conversation's hello."""
        method = message.get("method")
        kind = NOTICES.get(method) if isinstance(method, str) and "id" not in message else None
        if kind is None or not self.connected:
            return False
        try:
            notice = kind.model_validate(_cleaned(message.get("params")))
        except ValidationError as error:
            self._log.debug("a notification of the guest does not fit", method=method, why=error.errors()[0]["msg"])
            return False
        if isinstance(notice, MemoryState) and self._is_of_another_boot(notice):
            return False
        try:
            self._on_notice(notice)
        except Exception:
            self._log.exception("a notification of the guest could not be dealt with", method=method)
        return True

    def _is_of_another_boot(self, said: MemoryState) -> bool:
        """Whether it is not of the boot that said hello: then all begins anew.

        A guest that has booted again says nothing before its hello, which counts once; else each of its sentences
        could be a reboot, by which pressure ends.
        """
        if said.boot_id == self.boot_id:
            return False
        if self.connected:
            self._log.warning("the guest speaks for another boot than at its hello; the conversation starts again")
        self._rules_broken = True
        self.hang_up("it spoke for another boot than at its hello")
        return True


def _parsed(line: bytes) -> Mapping[str, Any]:
    """The message in a line, its texts as they came; empty where there is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _cleaned(said: Any) -> Any:
    """What was said with its texts cleaned, which takes time; empty where it is nested too deeply."""
    try:
        return cleaned(said)
    except RecursionError:
        return {}


def _checked(answer: type[Answer], result: Any) -> Answer:
    try:
        return answer.model_validate(result)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise GuestUnreachable(f"the guest's answer is no {answer.__name__}: {where}: {first['msg']}") from error

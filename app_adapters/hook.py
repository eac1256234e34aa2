"""The application hook without a transport: routes, the token, and what they answer (docs/reference/adapters.md).

server.py, wsgi.py and aio.py carry it; a service with a server of its own can call `Hook.reply` itself.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import threading
import zlib
from dataclasses import asdict
from http import HTTPStatus
from typing import Any, Callable, Dict, Iterable, Tuple
from urllib.parse import unquote

from app_adapters import __version__, checks
from app_adapters.adapter import Adapter
from app_adapters.errors import ApplicationError, BadBody, Conflict
from app_adapters.logs import fault, guarded, say
from app_adapters.messages import PreemptionNotice, RefusalBody, parse_preemption, parse_target
from app_adapters.operations import Operations

#: Where the guest agent puts the token of this VM.
TOKEN_FILE = "/run/ebbtide/token"
#: Longest body of a request, in bytes.
BODY_BYTES = 65536
#: Seconds for which a connection may keep silent.
REQUEST_TIMEOUT_S = 10.0
#: Connections at a time; the guest agent needs at most four.
CONNECTIONS = 16

HEALTH = "/healthz"
CAPABILITIES = "/deflation/v1/capabilities"
STATUS = "/deflation/v1/status"
TARGETS = "/deflation/v1/targets"
PREEMPTIONS = "/deflation/v1/preemptions"

#: A proxy before the service hides who asks, so whatever one has touched is refused.
PROXY_HEADERS = ("x-forwarded-for", "forwarded", "x-real-ip", "via")
#: What an application says that several processes serve without knowing of each other.
SEVERAL = (
    "several processes answer here and know nothing of each other's targets; "
    "have each start app_adapters.shared.SharedHookServer, which asks them all"
)

Reply = Tuple[int, Dict[str, Any]]
_LOOPBACK = re.compile(r"localhost|::1|127(?:\.[0-9]{1,3}){3}")


def require_loopback(host: str) -> None:
    """Raises: ValueError for a host to listen on that is not on loopback."""
    if not _LOOPBACK.fullmatch(host):
        raise ValueError(f"host: {host} is not on loopback")


def default_port(name: str) -> int:
    """The port of loopback that an application of this name has, where nothing else is chosen: below those that the
    kernel hands out, and seldom that of another application."""
    return 20000 + zlib.crc32(name.encode()) % 10000


def foreign(peer: str, headers: Iterable[str]) -> str:
    """Why a request does not come from this machine's guest agent; empty where it does.

    `headers` are the names of the request's, in lower case.
    """
    for name in headers:
        if name in PROXY_HEADERS:
            return f"a proxy passed this on ({name.title()}); the hook is for this machine only"
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return "who asks cannot be seen; the hook is for this machine only"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if not (mapped or address).is_loopback:
        return f"{peer} is not on loopback; the hook is for this machine only"
    return ""


def within(path: str) -> str:
    """A path without what a server puts before it: where the service is to be found behind a proxy."""
    before, mark, rest = path.partition("/deflation/v1/")
    return mark + rest if mark else before


def require_place(path: str, host: str, port: int | None) -> None:
    """Raises: ValueError unless there is one place to listen: a Unix socket, or by choice a port on loopback."""
    if bool(path) == (port is not None):
        raise ValueError("path: must be that of a Unix socket, or port one on loopback")
    require_loopback(host)


class TokenFile:
    """A token that may be replaced at any time; the file is read again when it changes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._token = b""

    def matches(self, authorization: str) -> bool:
        """Whether the header carries the token, compared in constant time. No file, or an empty one: never."""
        token = self._read()
        return bool(token) and hmac.compare_digest(b"Bearer " + token, authorization.encode("utf-8", "replace"))

    def need(self) -> str:
        """What a request lacks that has been turned away."""
        if self._token:
            return "needs the token of this VM as Bearer"
        return f"this hook has no token yet: {self._path} is missing, empty or not to be read by its user"

    def _read(self) -> bytes:
        try:
            info = os.stat(self._path)
            seen = (info.st_ino, info.st_mtime_ns, info.st_size)
            if seen != self._seen:
                with open(self._path, "rb") as file:
                    self._token = file.read(4096).strip()
                self._seen = seen
        except OSError:
            self._seen, self._token = None, b""
        return self._token


class Hook:
    """The hook of one adapter. `reply` may be called from several threads, and blocks while the adapter decides.

    `log` is given a sentence for every target: received, promised or refused, released or failed. By default they go to
    the logger `app_adapters`, as the adapter's faults do always.
    """

    def __init__(self, adapter: Adapter, token_file: str = TOKEN_FILE, log: Callable[[str], None] = say) -> None:
        self._adapter = adapter
        self._token = TokenFile(token_file)
        self._operations = Operations(adapter, log)
        self._log = guarded(log)
        self._told: PreemptionNotice | None = None
        self._telling = threading.Lock()

    def stop(self) -> None:
        """Cancel what runs, and wait for it for some seconds."""
        self._operations.stop()

    def reply(self, method: str, path: str, authorization: str, body: bytes) -> Reply:
        """Status and body for a request. `path` is as the client sent it, percent signs included."""
        try:
            return self._reply(method, path, authorization, body)
        except (Exception, SystemExit) as error:  # an adapter's fault must not look like a hook that hangs
            fault(f"{method} {path}: a fault of the adapter", error)
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}

    def _reply(self, method: str, path: str, authorization: str, body: bytes) -> Reply:
        if path == HEALTH and method == "GET":
            return HTTPStatus.OK, {"status": "ok", "version": __version__}
        if not self._token.matches(authorization):
            return HTTPStatus.UNAUTHORIZED, {"error": "Authorization: " + self._token.need()}
        if path == CAPABILITIES and method == "GET":
            try:
                return HTTPStatus.OK, asdict(checks.capabilities(self._adapter.capabilities()))
            except ApplicationError as error:
                return HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}
        if path == STATUS and method == "GET":
            try:
                return HTTPStatus.OK, {"sizes": checks.vector(self._adapter.status(), "status")}
            except ApplicationError as error:
                return HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}
        if path == TARGETS and method == "POST":
            return self._target(body)
        if path == PREEMPTIONS and method == "POST":
            return self._preemption(body)
        if path.startswith(TARGETS + "/") and method == "GET":
            request_id = unquote(path[len(TARGETS) + 1 :])
            status = self._operations.status(request_id)
            if status is None:
                return HTTPStatus.NOT_FOUND, {"error": f"request_id: {request_id} is unknown"}
            return HTTPStatus.OK, asdict(status)
        if path in (CAPABILITIES, STATUS, TARGETS, PREEMPTIONS, HEALTH) or path.startswith(TARGETS + "/"):
            return HTTPStatus.METHOD_NOT_ALLOWED, {"error": f"{method} does not go with {path}"}
        return HTTPStatus.NOT_FOUND, {"error": f"there is no {path}"}

    def _target(self, body: bytes) -> Reply:
        try:
            answer = self._operations.submit(parse_target(body))
        except BadBody as error:
            return HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except Conflict as error:
            return HTTPStatus.CONFLICT, {"state": "conflict", "error": str(error)}
        return HTTPStatus.CONFLICT if isinstance(answer, RefusalBody) else HTTPStatus.ACCEPTED, asdict(answer)

    def _is_news(self, notice: PreemptionNotice) -> tuple[bool, PreemptionNotice | None]:
        """Whether the application has not been told that already, and what it was told before; seconds go by and are
        no news."""
        with self._telling:
            last = self._told
            news = last is None or (last.request_id, last.kind) != (notice.request_id, notice.kind)
            if news:
                self._told = notice
        if news:
            when = "is over" if notice.seconds_left is None else f"{notice.kind} in {notice.seconds_left:g} s"
            self._log(f"preemption {notice.request_id}: {when} ({notice.reason})")
        return news, last

    def _preemption(self, body: bytes) -> Reply:
        try:
            notice = parse_preemption(body)
        except BadBody as error:
            return HTTPStatus.BAD_REQUEST, {"error": str(error)}
        news, before = self._is_news(notice)
        if news:
            try:
                self._adapter.preemption(notice.seconds_left, notice.kind, notice.reason)
            except BaseException as error:
                with self._telling:
                    if self._told is notice:  # so that it is news when it comes again
                        self._told = before
                if not isinstance(error, ApplicationError):
                    raise
                return HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}
        return HTTPStatus.OK, {"request_id": notice.request_id}

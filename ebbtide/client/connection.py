"""Connection of the client with the managers: requests, pages of a list, and which of several managers leads."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any, Final, Generic, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ValidationError

from ebbtide.client.errors import ClientError, ManagerBusy, ManagerRefused, ManagerStandsBy, ManagerUnreachable
from ebbtide.client.tls import tls_problem
from ebbtide.messages.common import Problem, as_sent, problem_in
from ebbtide.messages.problem_codes import ProblemCode

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


@dataclass
class Changed(Generic[T]):
    """The rows of a list that have changed.

    :param gone: the names of those that are in it no more.
    :param is_whole: it is the whole list, and what is not among the rows is gone, too.
    :param changes: by this one asks for what is new afterwards; 0: the manager is of an earlier version.
    """

    rows: list[T]
    gone: tuple[str, ...] = ()
    is_whole: bool = True
    changes: int = 0


#: How long one answer may take, beyond what the manager is asked to hold it back, seconds.
REQUEST_TIMEOUT_S = 30.0
#: A stream of events that is silent for so long is dead: the manager gives a sign of life every 15 s.
SILENT_STREAM_S = 40.0
#: Rows of one page.
PAGE = 1000
#: How long one waits for a manager that leads where several are known, seconds: longer than a take-over takes.
TAKE_OVER_S: Final = 15.0
PAUSE_S = 0.5
#: For how long one asks a manager again that has had too many requests of this token, seconds.
BUSY_S = 30.0
#: And no longer between two times, whatever it says.
BUSY_PAUSE_S = 5.0
#: How long one of several may take for an answer, seconds: a manager that hangs still takes connections.
ANSWER_S: Final = 10.0
#: Requests that the manager may hold back are sent no more than so many at a time: of the 100 connections that aiohttp
#: opens the others are for what is answered at once.
MOST_HELD: Final = 64
#: Segments of the manager's routes with the names in them; "." and ".." would be resolved to another path.
_PATH: Final = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._:-]+)+")


def check_path(path: str) -> None:
    """Refuse a path that holds anything but words and names. Raises ClientError before anything is sent."""
    if not _PATH.fullmatch(path):
        raise ClientError(f"{path.removeprefix('/v1/')!r} holds an invalid name: letters, digits and . _ : - only")


class Managers:
    """The managers of one store, of which one leads: their base URLs, the one that answered last in front.

    :param urls: one URL, or several with commas between them.
    """

    def __init__(self, urls: str) -> None:
        self._urls = [url.strip().rstrip("/") for url in urls.split(",") if url.strip()] or [urls]
        if any("@" in url.split("://", 1)[-1].split("/", 1)[0] for url in self._urls):
            # Not repeated here: it may hold a password.
            raise ClientError("the manager's address must not hold a name or password: it takes a token instead")
        for url in self._urls:
            if not _is_address(url):
                raise ClientError(f"{url!r} is no address of a manager: it must be like http://127.0.0.1:7100")

    @property
    def url(self) -> str:
        """Of the one that is asked first."""
        return self._urls[0]

    @property
    def several(self) -> bool:
        """Whether another one may be asked."""
        return len(self._urls) > 1

    def turn(self) -> None:
        """The one in front does not answer, or does not lead."""
        self._urls.append(self._urls.pop(0))

    async def ask(self, once: Callable[[str], Awaitable[T]]) -> T:
        """Ask one after another until one that leads has answered, or one may have done what is asked.

        One that has had too many requests has done nothing: it is asked again when it says so.

        :param once: asks the manager at a URL.
        """
        loop = asyncio.get_running_loop()
        busy_until = loop.time() + BUSY_S
        until = loop.time() + (TAKE_OVER_S if self.several else 0.0)
        while True:
            failures: list[ClientError] = []
            for url in tuple(self._urls):
                try:
                    return await _when_it_has_time(once, url, busy_until)
                except (ManagerUnreachable, ManagerStandsBy) as error:
                    failures.append(error)
                    self.turn()
                    if isinstance(error, ManagerUnreachable) and error.may_be_done:
                        raise
            if loop.time() >= until:
                # A standby that answers says more than one that does not.
                raise next((error for error in failures if isinstance(error, ManagerStandsBy)), failures[0])
            await asyncio.sleep(PAUSE_S)


async def _when_it_has_time(once: Callable[[str], Awaitable[T]], url: str, until: float) -> T:
    while True:
        try:
            return await once(url)
        except ManagerBusy as error:
            if asyncio.get_running_loop().time() + error.after_s > until:
                raise
            await asyncio.sleep(error.after_s)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # The port is looked at when it is asked for.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        return False


class Connection:
    """Base of the parts of `ebbtide.client.ManagerClient`: one session with a manager, or with several."""

    def __init__(self, url: str, token: str, *, tls: ssl.SSLContext | None = None) -> None:
        self._managers = Managers(url)
        self._token = token
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        #: Streams last, so that each has a connection that is no other request's.
        self._streams: aiohttp.ClientSession | None = None
        self._held = asyncio.Semaphore(MOST_HELD)
        self._polls = asyncio.Lock()

    @property
    def url(self) -> str:
        """Where the manager listens that answered last."""
        return self._managers.url

    @url.setter
    def url(self, url: str) -> None:
        self._managers = Managers(url)

    async def __aenter__(self) -> Self:
        headers, tls = {"Authorization": f"Bearer {self._token}"}, self._tls or True
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
            connector=aiohttp.TCPConnector(ssl=tls),
            trace_configs=[_only_once()],
        )
        self._streams = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=tls, limit=0))
        # Of this loop: it may be entered once more in another one.
        self._held = asyncio.Semaphore(MOST_HELD)
        self._polls = asyncio.Lock()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in (self._session, self._streams):
            if session is not None:
                await session.close()

    async def _list(
        self, path: str, key: str, model: type[Model], query: Mapping[str, object], limit: int | None = None
    ) -> list[Model]:
        """The rows of all pages, or the first ``limit``."""
        return (await self._pages(path, key, model, query, limit)).rows

    async def _pages(
        self, path: str, key: str, model: type[Model], query: Mapping[str, object], limit: int | None = None
    ) -> Changed[Model]:
        """The same with what the first page says of changes: what came later is new to whoever asks by that again."""
        found: Changed[Model] = Changed([])
        after: str | None = None
        while limit is None or len(found.rows) < limit:
            page = {"limit": PAGE if limit is None else min(limit - len(found.rows), PAGE), "after": after}
            body = await self._request("GET", path, query=query_of({**query, **page}))
            try:
                # A manager of a later version may say more.
                found.rows += [model.model_validate(row, extra="ignore", context=as_sent) for row in body[key]]
                if after is None:
                    found.changes = body.get("changes", 0)
                # One page may be of all and another of changes: where the manager, or how much has changed, differs.
                found.is_whole = found.is_whole and body.get("changed_since") is None
                found.gone = tuple(sorted({*found.gone, *body.get("gone", ())}))
                after = body["next"]
            except (ValidationError, KeyError, TypeError) as error:
                raise ManagerUnreachable(f"{self.url} does not answer like a manager: {error}") from error
            if after is None:
                break
        return found

    async def _one(
        self,
        method: str,
        path: str,
        model: type[Model],
        *,
        query: dict[str, str] | None = None,
        body: BaseModel | None = None,
        headers: dict[str, str] | None = None,
        held_s: float = 0.0,
    ) -> Model:
        """One request and its answer.

        :param held_s: how long the manager may hold its answer back. These have their turn one after the other.
        """
        async with self._held if held_s else nullcontext():
            asked_at = asyncio.get_running_loop().time()
            try:
                answer = await self._request(method, path, query=query, body=body, headers=headers, held_s=held_s)
            except ClientError as error:
                error.silent_s = max(asyncio.get_running_loop().time() - asked_at - held_s, 0.0)
                raise
        try:
            # A manager of a later version may say more.
            return model.model_validate(answer, extra="ignore", context=as_sent)
        except ValidationError as error:
            raise ManagerUnreachable(f"{self.url} does not answer like a manager: {error}") from error

    def _stream(
        self, path: str, query: dict[str, str], headers: dict[str, str], silent_s: float = SILENT_STREAM_S
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._streams is None:
            raise RuntimeError("ManagerClient is used outside of its context")
        check_path(path)
        limits = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_TIMEOUT_S, sock_read=silent_s)
        return self._streams.get(self.url + path, params=query, headers=headers, timeout=limits)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: BaseModel | None = None,
        headers: dict[str, str] | None = None,
        held_s: float = 0.0,
    ) -> Any:
        if self._session is None:
            raise RuntimeError("ManagerClient is used outside of its context")
        check_path(path)
        answered_s = ANSWER_S if self._managers.several else REQUEST_TIMEOUT_S
        timeout = aiohttp.ClientTimeout(total=answered_s + held_s)
        session, data = self._session, body.model_dump(mode="json", exclude_defaults=True) if body is not None else None
        options: dict[str, Any] = {"params": query, "json": data, "headers": headers, "timeout": timeout}
        # Anything else does again what was done, or is refused because it was.
        is_harmless = method == "GET" or "request_id" in (query or ()) or "request_id" in (data or ())

        async def once(url: str) -> Any:
            sent: dict[str, Any] = {}
            try:
                tracing = (sent, is_harmless)
                async with session.request(method, url + path, trace_request_ctx=tracing, **options) as answer:
                    content = await answer.json(content_type=None)
                    if answer.status >= 400:
                        raise refusal_of(answer.status, content, answer.headers.get("Retry-After"))
                    return content
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                if (why := tls_problem(url, error)) is not None:
                    said = f"no connection with {url}: {why}"
                else:
                    said = f"no manager answers at {url}: {str(error) or type(error).__name__}"
                lost = bool(sent) and not is_harmless
                if lost:
                    said += "; what was asked for may have been done"
                raise ManagerUnreachable(said, was_sent=bool(sent), may_be_done=lost) from error

        return await self._managers.ask(once)


def _only_once() -> aiohttp.TraceConfig:
    """Notes in the context of a request, where it has one, that it is sent; unless it is harmless, only once.

    aiohttp repeats a DELETE or PUT by itself whose connection breaks.
    """

    async def about_to_send(
        _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceRequestHeadersSentParams
    ) -> None:
        if context.trace_request_ctx is not None:
            sent, is_harmless = context.trace_request_ctx
            if sent and not is_harmless:
                raise aiohttp.ServerDisconnectedError
            sent["sent"] = True

    tracing = aiohttp.TraceConfig()
    tracing.on_request_headers_sent.append(about_to_send)
    return tracing


def query_of(values: Mapping[str, object]) -> dict[str, str]:
    """Parameters without those that are not given."""
    return {
        name: f"{value:.6f}" if isinstance(value, float) else str(value)
        for name, value in values.items()
        if value is not None
    }


def refusal_of(status: int, content: Any, retry_after: str | None = None) -> ManagerRefused:
    """The error for a 4xx or 5xx. ``retry_after``: the header that says when to ask again."""
    problem = problem_in(status, json.dumps(content))
    if problem is None:
        # A manager says what is missing; a proxy, or another server, has no such path.
        code = ProblemCode.NO_SUCH_ROUTE if status == 404 else None
        problem = Problem.of(status, f"the manager answered with status {status}", code=code)
    if status == 429:
        busy = ManagerBusy(status, problem.detail, problem.field, problem)
        if retry_after is not None and retry_after.isdecimal():
            busy.after_s = min(max(float(retry_after[:9]), PAUSE_S), BUSY_PAUSE_S)
        return busy
    kind = ManagerStandsBy if status == 503 and retry_after is not None else ManagerRefused
    return kind(status, problem.detail, problem.field, problem)

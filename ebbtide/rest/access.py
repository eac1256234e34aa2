"""Access control: token, certificate, rate, role and the time that a body may take, before any handler runs."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from ebbtide.rest.errors import Refused
from ebbtide.rest.rates import Buckets, Rate, Rates, counted
from ebbtide.rest.roles import OPEN_ROUTES, Role, allowed, covers, needed, same_kind
from ebbtide.rest.tls import Replaceable, common_name, counts_still
from ebbtide.rest.tokens import Principal, Principals, principal

log = structlog.get_logger()

#: Who sent the request; not set on open routes.
PRINCIPAL: Final = web.RequestKey("principal", Principal)
#: Headers that say how many requests its caller has left; not set where there is no limit.
RATE_LIMIT: Final[web.RequestKey[dict[str, str]]] = web.RequestKey("rate_limit", dict)


#: Who is refused is told in the log, but cannot fill a disk with it.
_TOLD: Final = Rate(per_s=0.1, burst=10.0)
#: Characters of a path in such a line.
_PATH: Final = 200


@dataclass(frozen=True, slots=True)
class Certificates:
    """What a client's certificate must say; the CA has been looked at when the connection was made.

    :param of_host: on the routes of agents its common name is the host that the path is about.
    :param name: its common name on every route; None: any, or none.
    """

    of_host: bool = False
    name: str | None = None


class Access:
    """The rules of one server.

    :param rates: None: no limit.
    :param body_timeout_s: what a body may take to arrive.
    :param clock: seconds, for the rates.
    :param hosts_key: of host agents' tokens.
    :param revoked: hosts whose tokens count no more.
    :param server: the context of the server's connections, where there is TLS.
    :param now: seconds since the epoch, for certificates.
    """

    def __init__(
        self,
        principals: Iterable[Principal],
        rates: Rates | None = None,
        body_timeout_s: float = 10.0,
        certificates: Certificates = Certificates(),
        clock: Callable[[], float] = time.monotonic,
        hosts_key: str | None = None,
        revoked: Iterable[str] = (),
        server: Replaceable | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.principals = Principals(principals, hosts_key, revoked)
        self.body_timeout_s = body_timeout_s
        self._rates = rates
        self._certificates = certificates
        self._clock = clock
        self._server = server
        self._now = now
        self._buckets = Buckets()
        self._told = Buckets()

    def middleware(self) -> Middleware:
        """Stands directly inside of the one that turns errors into Problems."""

        @web.middleware
        async def access(request: web.Request, handler: Handler) -> web.StreamResponse:
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else None
            if route in OPEN_ROUTES:
                # A proxy asks for its health from the address from which wrong tokens of its clients come as well.
                whose = "health" if route in ("/healthz", "/readyz") else "address"
                self._count(request, f"{whose} {counted(request.remote)}", "strangers")
            else:
                request[_ACCESS] = self
                request[PRINCIPAL] = self._admit(request, route)
            await self._take_body(request)
            return await handler(request)

        return access

    def _admit(self, request: web.Request, route: str | None) -> Principal:
        """Who calls.

        :param route: None where nothing is.
        :raises Refused: 401, 403 or 429.
        """
        role = Role.VIEWER if route is None else needed(request.method, route)
        caller = self._caller(request)
        if caller is None or not same_kind(caller.role, role):
            # No caller without the right token learns even which paths exist.
            self._count(request, f"address {counted(request.remote)}", "strangers")
            if not self._told.take("log", _TOLD, self._clock()):
                path = request.rel_url.raw_path[:_PATH]
                log.warning("no right token", address=request.remote, method=request.method, path=path)
            raise Refused(
                401,
                "the Authorization header must be 'Bearer' with the right token",
                hdrs.AUTHORIZATION,
                {hdrs.WWW_AUTHENTICATE: f'Bearer realm="ebbtide {"agents" if role is Role.AGENT else "clients"}"'},
            )
        # Quoted, since it is repeated in sentences and the log: no name has anything to quote, an escape sequence has.
        named = request.match_info.get("id") if role is Role.AGENT else None
        host = quote(named) if named is not None else None
        # A single count, whatever hosts an agent names.
        self._count(request, f"token {caller.name}", "agents" if role is Role.AGENT else "people")
        self._check_certificate(caller, request, host)
        if route is not None and not allowed(caller.role, request.method, route):
            raise self._refused(caller, request, f"{request.method} {request.rel_url.raw_path} needs the role {role}")
        if caller.host is not None and host != caller.host:
            raise self._refused(caller, request, f"this token is of the host {caller.host}, the report of {host}")
        return caller

    def _caller(self, request: web.Request) -> Principal | None:
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        return self.principals.of(token.strip()) if scheme.lower() == "bearer" else None

    def _check_certificate(self, caller: Principal, request: web.Request, host: str | None) -> None:
        rules = self._certificates
        if rules.name is None and not (rules.of_host and host is not None):
            return
        given = request.get_extra_info("peercert")
        if given and (why := self._why_over(given, request)):
            # About the connection: whoever has a certificate that counts comes again, as where a daemon is away.
            raise self._refused(
                caller, request, f"{why}; connect again, with one that counts", 503, {hdrs.CONNECTION: "close"}
            )
        if rules.name is not None and common_name(given) != rules.name:
            raise self._refused(caller, request, f"the client's certificate must have the common name {rules.name}")
        if rules.of_host and host is not None and common_name(given) != host:
            raise self._refused(caller, request, f"the client's certificate must have the common name {host}")

    def _why_over(self, given: Mapping[str, Any], request: web.Request) -> str:
        """Why a certificate that was good when its connection was made is so no more; empty where it is."""
        if ssl.cert_time_to_seconds(given["notAfter"]) <= self._now():
            return "the client's certificate has ended"
        context = request.get_extra_info("ssl_object").context
        if self._server is not None and not counts_still(context, self._server.inner):
            return "a CA of before counts no more"
        return ""

    def _refused(
        self,
        caller: Principal,
        request: web.Request,
        sentence: str,
        status: int = 403,
        headers: Mapping[str, str] | None = None,
    ) -> Refused:
        if not self._told.take(f"refused {caller.name}", _TOLD, self._clock()):
            path = request.rel_url.raw_path[:_PATH]
            log.warning("refused", who=caller.name, why=sentence, method=request.method, path=path)
        return Refused(status, sentence, None, headers)

    def _count(self, request: web.Request, caller: str, kind: str) -> None:
        if self._rates is None:
            return
        rate: Rate = getattr(self._rates, kind)
        wait_s = self._buckets.take(caller, rate, self._clock())
        left, full_s = self._buckets.left(caller, rate, self._clock())
        request[RATE_LIMIT] = {
            "RateLimit-Policy": f'"{kind}";q={math.floor(rate.burst)};w={math.ceil(rate.burst / rate.per_s)}',
            "RateLimit": f'"{kind}";r={left};t={math.ceil(full_s)}',
        }
        if wait_s > 0:
            after = str(math.ceil(wait_s))
            sentence = f"more than {rate.per_s:g} requests a second; try again in {after} s"
            raise Refused(429, sentence, None, {hdrs.RETRY_AFTER: after})

    async def _take_body(self, request: web.Request) -> None:
        """Have the whole body, so that no handler waits for a client; it is kept for the handler.

        :raises Refused: 408 it is too slow, 400 it ends too early.
        :raises web.HTTPRequestEntityTooLarge: it is too large.
        """
        if not request.can_read_body:
            return
        try:
            async with asyncio.timeout(self.body_timeout_s):
                await request.read()
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.body_timeout_s:g} s") from None
        except (web.RequestPayloadError, aiohttp.ClientPayloadError, ConnectionError):
            raise Refused(400, "the body ends too early or is not what its headers say") from None


#: Who let the request in; not set on open routes.
_ACCESS: Final = web.RequestKey("access", Access)


def still_known(request: web.Request) -> bool:
    """For handlers that answer for long: the caller's token counts as it did when the request came."""
    return request[PRINCIPAL] in request[_ACCESS].principals


def require(request: web.Request, role: Role, what: str) -> None:
    """For handlers: what a request asks for in its body needs a role of its own.

    :param what: the field that needs it, as it stands on the wire.
    :raises Refused: 403 for every other caller.
    """
    caller = request.get(PRINCIPAL)
    if caller is None or not covers(caller.role, role):
        raise Refused(403, f"{what} needs the role {role}", what)


def tokens_only(token: str, hosts_key: str | None = None, role: Role = Role.ADMIN) -> Access:
    """A token of this role, and those of hosts, without limits of rate."""
    return Access([principal("token-file", role, token)] if token else [], hosts_key=hosts_key)

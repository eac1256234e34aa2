"""Rules and TLS contexts of a REST server, made from its settings: read from files, and again on SIGHUP."""

from __future__ import annotations

import contextlib
import itertools
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path

from aiohttp import web

from ebbtide.rest.access import Access, Certificates
from ebbtide.rest.errors import AccessError
from ebbtide.rest.listener import Listener, serving
from ebbtide.rest.settings import AccessSettings
from ebbtide.rest.tls import Replaceable, client_context, server_context
from ebbtide.rest.tokens import Principal, Principals, read_revoked, read_tokens


class Gate:
    """One server's. Reads files: not for the event loop's thread.

    :param own: who may come in besides those in the tokens file; where it reads them from files, each time anew.
    :param certificates: what a client's certificate must say, where there is mutual TLS.
    :param required: no connection without a certificate, where there is mutual TLS.
    :param hosts_key: of host agents' tokens.
    :param signs: whether something else goes by the CAs, too, and only by those of the start.
    :raises AccessError: a file cannot be used.
    """

    def __init__(
        self,
        settings: AccessSettings,
        own: Iterable[Principal] | Callable[[], Iterable[Principal]],
        certificates: Certificates,
        required: bool,
        hosts_key: str | None = None,
        signs: bool = False,
    ) -> None:
        self._settings = settings
        self._signs = signs
        self._own = own if callable(own) else tuple(own)
        self._required = required
        self._hosts_key = hosts_key
        self._of_host = certificates.of_host
        self._peer = certificates.name
        self._ca = settings.server_ca or settings.client_ca
        self._caller = settings.caller or (settings.own if settings.client_ca is not None else None)
        mutual = settings.own is not None and settings.client_ca is not None
        server, calls = self._server(), self._calls()
        self.server = Replaceable.of(server) if server is not None else None
        self.access = Access(
            self._principals(),
            settings.rates,
            settings.body_timeout_s,
            certificates if mutual else Certificates(),
            hosts_key=hosts_key,
            revoked=self._revoked(),
            server=self.server,
        )
        #: For calls of the other daemon; None where no CA and no certificate is configured for them.
        self.calls = Replaceable.of(calls) if calls is not None else None
        self._cas = self._authorities()
        self._own_pem = self._own_certificate()
        #: Numbers what is read again, and the last of it that is in force.
        self._readings = itertools.count(1)
        self._in_force = 0
        #: Called when what was read again is in force.
        self.on_change: Callable[[], None] = lambda: None

    @property
    def scheme(self) -> str:
        """Of the server's URL."""
        return self._settings.scheme

    def serve(
        self, app: web.Application, host: str, port: int, shutdown_timeout_s: float
    ) -> contextlib.AbstractAsyncContextManager[Listener]:
        """Serve an application behind this gate; see `rest.listener.serving`."""
        return serving(app, host, port, self.server, self._settings.limits, shutdown_timeout_s)

    def read_again(self) -> Callable[[], None]:
        """Read tokens, certificates, keys and CAs.

        :returns: puts them into force, on the event loop's thread; connections that are there go on, but for
            those between manager and hosts that were let in when a CA counted that counts no more. It does nothing
            where what was begun to be read later is in force already: two threads may read, with a renewal in between.
        :raises AccessError: a file cannot be used, or a CA is another one than that of the start, and signs.
        """
        number = next(self._readings)
        cas = self._authorities()
        for path, content in self._cas.items():
            # Hosts would get certificates of one that counts no more.
            if self._signs and cas[path] != content:
                raise AccessError(f"the CA {path} has changed; start the daemon again to use it")
        principals = Principals(self._principals(), self._hosts_key, self._revoked())
        server, calls, own_pem = self._server(), self._calls(), self._own_certificate()

        def apply() -> None:
            if number < self._in_force:
                return
            self._in_force = number
            self.access.principals = principals
            self._own_pem, self._cas = own_pem, cas
            for context, fresh in ((self.server, server), (self.calls, calls)):
                if context is not None and fresh is not None:
                    context.inner = fresh
            self.on_change()

        return apply

    def _principals(self) -> tuple[Principal, ...]:
        path = self._settings.tokens_file
        found = read_tokens(path) if path is not None else ()
        return (*(self._own() if callable(self._own) else self._own), *found)

    def certificates(self) -> tuple[bytes, ...]:
        """What is in force, whatever stands in the files by now: its own certificate and the CAs, PEM."""
        return (*self._own_pem, *self._cas.values())

    def _authorities(self) -> dict[Path, bytes]:
        paths = (self._settings.client_ca, self._settings.server_ca)
        return {path: _bytes(path) for path in paths if path is not None}

    def _own_certificate(self) -> tuple[bytes, ...]:
        own = self._settings.own
        return (_bytes(own.certificate, "certificate"),) if own is not None else ()

    def revoked(self) -> frozenset[str]:
        """The hosts that are called lost: nothing of them counts, and nothing is sent to them."""
        return self.access.principals.revoked

    def _revoked(self) -> frozenset[str]:
        path = self._settings.tokens_file
        return read_revoked(path) if path is not None else frozenset()

    def _server(self) -> ssl.SSLContext | None:
        settings = self._settings
        return server_context(settings.own, settings.client_ca, self._required) if settings.own is not None else None

    def _calls(self) -> ssl.SSLContext | None:
        """Where there is mutual TLS a manager calls each host by its id, and a host its manager by name and address."""
        if self._ca is None and self._caller is None:
            return None
        mutual = self._settings.client_ca is not None
        return client_context(
            self._ca, self._caller, peer=self._peer if mutual else None, by_name=mutual and self._of_host
        )


def _bytes(path: Path, what: str = "CA certificate") -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AccessError(f"cannot use the {what} {path}: {error.strerror or error}") from error

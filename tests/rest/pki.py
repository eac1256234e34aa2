"""Certificates for tests: of a CA, of another one, expired, with the wrong name."""

from __future__ import annotations

import ssl
from pathlib import Path

from ebbtide.cli.certificates import Authority, Purpose, make_certificates
from ebbtide.rest.tls import KeyPair, client_context

LOOPBACK = ("127.0.0.1", "localhost")


class Pki:
    """A CA in a directory."""

    def __init__(self, directory: Path) -> None:
        self._authority = Authority.in_directory(directory, 2)
        self.ca = directory / "ca.pem"
        self._directory = directory

    def pair(self, name: str, addresses: tuple[str, ...] = LOOPBACK, days: int = 1) -> KeyPair:
        """A certificate of that common name; with 0 days it expires as it is made."""
        (certificate,) = make_certificates(self._authority, [Purpose(name, addresses)], days)
        return KeyPair(certificate, certificate.with_suffix(".key"))

    def client(self, own: KeyPair | None = None) -> ssl.SSLContext:
        """For a client that trusts this CA."""
        return client_context(self.ca, own)

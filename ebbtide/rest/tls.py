"""TLS 1.2 and above, one-sided or mutual: contexts of both directions from files, and what certificates say."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ebbtide.rest.errors import AccessError
from ebbtide.rest.tokens import check_private

if TYPE_CHECKING:
    from cryptography import x509


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than localhost is never assumed to be one."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_everywhere(host: str) -> bool:
    """Whether an address means all of a machine, where one can listen and nobody can call."""
    try:
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_unspecified


def is_protected(url: str) -> bool:
    """Whether what is sent to a URL can be read on this machine at the most: HTTPS, or loopback."""
    try:
        parts = urlsplit(url)
        return parts.scheme == "https" or is_loopback(parts.hostname or "")
    except ValueError:
        return False


def names_a_host(url: str) -> bool:
    """Whether a URL has a host, and a port that can be where it has one."""
    try:
        parts = urlsplit(url)
        # The port is looked at when it is asked for.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_base(url: str) -> bool:
    """Whether a URL is a scheme, a host and, it may be, a port, nothing else: what paths are put behind."""
    return names_a_host(url) and re.fullmatch(r"\w+://(\[[^\s\]]+\]|[\w.-]+)(:\d+)?", url) is not None


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate (with its chain) and its key, both PEM."""

    certificate: Path
    key: Path

    def load(self, context: ssl.SSLContext) -> None:
        """Put it into a context, also in the place of an older one: connections made from then on use it.

        :raises AccessError: a file cannot be read, or the two do not belong together.
        """
        try:
            # A key with a password would ask for it on the terminal.
            check_private(self.key, "key")
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise AccessError(
                f"cannot use the certificate {self.certificate} with the key {self.key}: {_why(error)}"
            ) from error


def server_context(own: KeyPair, client_ca: Path | None = None, required: bool = False) -> ssl.SSLContext:
    """What a REST server answers with.

    :param client_ca: whose client certificates are accepted; None: none is asked for.
    :param required: no connection without one; else it is up to the route.
    :raises AccessError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    own.load(context)
    if client_ca is not None:
        _trust(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


class _Identified(ssl.SSLObject):
    """Connection whose handshake fails, before anything is sent, where the peer's certificate has another name."""

    def do_handshake(self) -> None:
        super().do_handshake()
        context = self.context
        wanted = context.peer if isinstance(context, _Identifying) and context.peer else self.server_hostname
        if (found := common_name(self.getpeercert())) is None or found != wanted:
            raise ssl.SSLCertVerificationError(1, f"the certificate is of {found}, not of {wanted}")


class _Identifying(ssl.SSLContext):
    """Context that looks at the common name of the server's certificate.

    :param peer: what it must be; None: what each connection is made for (``server_hostname``).
    """

    peer: str | None = None
    sslobject_class = _Identified


def client_context(
    ca: Path | None, own: KeyPair | None = None, *, peer: str | None = None, by_name: bool = False
) -> ssl.SSLContext:
    """What a client calls with: the server's certificate must be valid and of the address in the URL.

    :param ca: who signs servers' certificates; None: whom this machine trusts.
    :param own: a certificate of the client's own, for mutual TLS.
    :param peer: the common name that the server's certificate must have, too.
    :param by_name: the common name must be the ``server_hostname`` of each call, whatever the address: for servers
        that are known by name and move.
    :raises AccessError: a file cannot be used.
    """
    context = _Identifying(ssl.PROTOCOL_TLS_CLIENT) if peer or by_name else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if isinstance(context, _Identifying):
        context.peer = peer
        context.check_hostname = not by_name
    if ca is not None:
        _trust(context, ca)
    else:
        context.load_default_certs()
    if own is not None:
        own.load(context)
    return context


def issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    """Whether a CA has signed it."""
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of it, hexadecimal."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()


class Replaceable(ssl.SSLContext):
    """Context whose connections another one makes, which can be replaced: a context itself forgets no CA.

    It has nothing of its own: no certificate, and nobody that it trusts.
    """

    inner: ssl.SSLContext

    @classmethod
    def of(cls, context: ssl.SSLContext) -> Replaceable:
        made = cls(context.protocol)
        made.inner = context
        return made

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.inner.wrap_bio(*args, **options)


def counts_still(connection: ssl.SSLContext, present: ssl.SSLContext) -> bool:
    """Whether every CA by which a connection was let in is trusted by now, too."""
    if connection is present:
        return True
    return set(connection.get_ca_certs(binary_form=True)) <= set(present.get_ca_certs(binary_form=True))


def common_name(certificate: Mapping[str, Any] | None) -> str | None:
    """The subject's common name in what ``getpeercert`` returns; None where there is none, or more than one."""
    subject = (certificate or {}).get("subject", ())
    names = [value for part in subject for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else None


def _trust(context: ssl.SSLContext, ca: Path) -> None:
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise AccessError(f"cannot use the CA certificate {ca}: {_why(error)}") from error


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"{error.reason or error}".replace("_", " ").lower()
    return str(error.strerror or error)


def first_end(certificates: Iterable[bytes]) -> datetime.datetime | None:
    """When the first of these ends to be valid; None where there is none, or nothing here can read them.

    :param certificates: PEM; of several in one file the first counts.
    """
    texts = tuple(certificates)
    if not texts:
        return None
    try:
        from cryptography import x509
    except ImportError:
        return None
    ends = []
    for text in texts:
        with suppress(ValueError):
            ends.append(x509.load_pem_x509_certificate(text).not_valid_after_utc)
    return min(ends, default=None)

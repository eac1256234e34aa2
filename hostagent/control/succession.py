"""Succession of the cluster's CA: the one that follows is trusted where the one of before vouches for it.

All is in the file of ``--client-ca``: while it is handed over both CAs stand there, and what it held before is kept
beside it, so that it is known which one goes at the end. The host shows by its certificate how far it is: it asks for
one of the CA that follows only once it trusts that one.
"""

from __future__ import annotations

import asyncio
import datetime
import ssl
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import structlog

from ebbtide.messages.enrolment import SUCCESSOR_NAME, Authority, Successor
from ebbtide.rest.errors import AccessError
from ebbtide.rest.tls import KeyPair, client_context, fingerprint, issued_by
from hostagent.control.asking import ask
from hostagent.state.files import replace

if TYPE_CHECKING:
    from cryptography import x509

log = structlog.get_logger()


class Succession:
    """Of the CAs that one host trusts.

    :param ca: the file of ``--client-ca``.
    :param own: the pair of this host.
    :param managers: their base URLs.
    :param tls: for calls of them, by what counts now.
    :param apply: puts new files into force. Raises AccessError.
    :param peer: the common name of the managers' certificates.
    """

    def __init__(
        self,
        ca: Path,
        own: KeyPair,
        managers: Sequence[str],
        tls: ssl.SSLContext,
        apply: Callable[[], Callable[[], None]],
        peer: str,
    ) -> None:
        self._ca = ca
        self._before = before_of(ca)
        self._own = own
        self._managers = [url.rstrip("/") for url in managers]
        self._tls = tls
        self._apply = apply
        self._peer = peer
        #: What stands in the file by now is not in force.
        self._pending = False
        #: SHA-256 of the CA that is to sign this host's certificate; None: the manager's present one.
        self.signer: str | None = None

    async def look(self) -> bool:
        """Take over what there is.

        :returns: whether this host's certificate is to be of the CA that follows, and is not yet.
        :raises AccessError, OSError: something cannot be taken over.
        """
        if self._pending:
            await self._use()
        old, following = await asyncio.to_thread(self._read)
        if following is not None and await self._has_come(following):
            await asyncio.to_thread(self._write, [following])
            await self._use()
            await asyncio.to_thread(self._before.unlink, missing_ok=True)
            log.info("the CA of before is trusted no more", ca=str(self._ca), dropped=", ".join(map(_words, old)))
            old, following = [following], None
        if (offered := await self._offered()) is not None:
            named = _certificate(offered.ca)
            if named not in (following, *old):
                vouched(offered, old, datetime.datetime.now(datetime.UTC))
            # It may have been put there by hand.
            others = [one for one in old if one != named]
            if named != following and others:
                await asyncio.to_thread(self._take, others, named)
                await self._use()
                log.info("the CA that follows is trusted, too", ca=str(self._ca), following=_words(named))
                following = named
        self.signer = fingerprint(following) if following is not None else None
        return following is not None and not await asyncio.to_thread(self._is_ours, following)

    def _read(self) -> tuple[list[x509.Certificate], x509.Certificate | None]:
        """The CAs that were trusted at first, and the one that has come beside them."""
        current = _certificates(self._ca)
        before = _certificates(self._before) if self._before.exists() else []
        old = [one for one in current if one in before] or current
        return old, next((one for one in current if one not in old), None)

    def _take(self, old: list[x509.Certificate], following: x509.Certificate) -> None:
        # First what was there: where that fails nothing has changed.
        replace(self._before, _text(old))
        self._write([*old, following])

    def _write(self, certificates: Sequence[x509.Certificate]) -> None:
        mode = self._ca.stat().st_mode
        replace(self._ca, _text(certificates))
        self._ca.chmod(mode & 0o777)

    async def _use(self) -> None:
        self._pending = True
        (await asyncio.to_thread(self._apply))()
        self._pending = False

    def _is_ours(self, ca: x509.Certificate) -> bool:
        """Whether it has signed this host's certificate."""
        return issued_by(_certificates(self._own.certificate)[0], ca)

    async def _has_come(self, following: x509.Certificate) -> bool:
        """Whether the CA that follows has taken its place: this host's certificate is of it, and those of managers are.

        One that does not answer says nothing, but one must say so.
        """
        if not await asyncio.to_thread(self._is_ours, following):
            return False
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(_text([following]))
            file.flush()
            alone = client_context(Path(file.name), self._own, peer=self._peer)
        said = False
        for manager in self._managers:
            try:
                found = await ask(alone, f"{manager}/v1/ca", Authority)
            except aiohttp.ClientSSLError:
                return False
            except (aiohttp.ClientError, TimeoutError, ValueError):
                continue
            said = said or _certificate(found.ca) == following
        return said

    async def _offered(self) -> Successor | None:
        """The CA that is to follow, as a manager tells; None: none does."""
        for manager in self._managers:
            try:
                return await ask(self._tls, f"{manager}/v1/ca/next", Successor)
            except (aiohttp.ClientError, TimeoutError, ValueError):
                # Nothing is to follow, it is of an earlier version, a standby, or away.
                continue
        return None


def before_of(ca: Path) -> Path:
    """Where the CAs of before are kept while they are handed over."""
    return ca.with_name(f"{ca.name}.before")


def vouched(offered: Successor, trusted: Sequence[x509.Certificate], now: datetime.datetime) -> None:
    """Look whether a CA that is trusted has named the one that is offered.

    Whoever has a manager's certificate can offer one; the key of a CA is needed to name it.

    :raises AccessError: it is not to be trusted.
    """
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    ca, proof = _certificate(offered.ca), _certificate(offered.proof)
    try:
        by = next((one for one in trusted if issued_by(proof, one)), None)
        names = [(part.oid, part.value) for part in proof.subject]
        is_ca = ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca and issued_by(ca, ca)
        same_key = proof.public_key() == ca.public_key()
    except Exception as error:
        # Its parser has many words for what cannot be.
        raise AccessError(f"the CA that is said to follow cannot be read: {error or type(error).__name__}") from error
    for good, why in (
        (by is not None, "no CA that is trusted here vouches for it"),
        # Hosts have certificates of keys of their own: only one by this name says what is meant.
        (names == [(NameOID.COMMON_NAME, SUCCESSOR_NAME)], "the word for it is a certificate of something else"),
        (same_key, "the word for it is about another key"),
        (is_ca, "it is no CA"),
        (all(one is None or _counts(one, now) for one in (by, proof, ca)), "a certificate has ended, or not begun"),
    ):
        if not good:
            raise AccessError(f"the CA that is said to follow, {_words(ca)}, is not trusted: {why}")


def _counts(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def _certificate(text: str) -> x509.Certificate:
    """:raises AccessError: it is none."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(text.encode())
    except ValueError as error:
        raise AccessError(f"a manager names a CA that is no certificate: {error}") from error


def _certificates(path: Path) -> list[x509.Certificate]:
    """:raises AccessError: there is none."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise AccessError(f"cannot read certificates in {path}: {error}") from error


def _text(certificates: Sequence[x509.Certificate]) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return "".join(one.public_bytes(Encoding.PEM).decode() for one in certificates)


def _words(certificate: x509.Certificate) -> str:
    return f"{certificate.subject.rfc4514_string()[:200]} ({fingerprint(certificate)[:16]})"

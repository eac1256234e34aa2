"""Renewal of this host's certificate, by itself, while the present one still counts."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import structlog

from ebbtide.messages.enrolment import LONGEST_PEM, Renewal, RenewalRequest
from ebbtide.rest.errors import AccessError
from ebbtide.rest.tls import KeyPair
from hostagent.control.asking import Refused, ask
from hostagent.control.succession import Succession
from hostagent.state.files import replace

if TYPE_CHECKING:
    from cryptography import x509

log = structlog.get_logger()

#: How often it is looked whether it is time, and how soon again after a failure, seconds.
EVERY_S: Final = 3600.0
#: What must be left of its lifetime.
LEAST_LEFT: Final = 1 / 3


class PlaceError(AccessError):
    """A renewed certificate could not be kept."""


def due(begins: datetime.datetime, ends: datetime.datetime, now: datetime.datetime) -> bool:
    """Whether it is time to renew a certificate."""
    return ends - now < (ends - begins) * LEAST_LEFT


def counts(begins: datetime.datetime, ends: datetime.datetime, now: datetime.datetime) -> bool:
    """Whether a certificate counts now: one that a manager with a wrong clock has signed may not yet, or no more."""
    return begins <= now < ends


def load(path: Path) -> x509.Certificate:
    """:raises AccessError: there is no certificate."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise AccessError(f"cannot read the certificate {path}: {error}") from error


def check_place(certificate: Path) -> None:
    """Look whether another one could take the place of a certificate. Blocks.

    :raises PlaceError: it could not.
    """
    try:
        with tempfile.TemporaryFile(dir=certificate.parent) as file:
            file.write(bytes(LONGEST_PEM))
    except OSError as error:
        raise PlaceError(f"{certificate.parent} cannot be written: {error.strerror or error}") from error


def request_of(key: Any, host: str) -> str:
    """A request (PKCS #10) for a certificate of this host."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ed25519
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, algorithm).public_bytes(Encoding.PEM).decode()


class Renewing:
    """Looks now and then until cancelled.

    :param own: the pair of this host; the certificate is replaced, the key stays.
    :param managers: their base URLs; the one that leads signs.
    :param tls: with the certificate that still counts.
    :param apply: puts new files into force. Raises AccessError.
    :param succession: of the CA; None: one that follows is taken over by hand.
    """

    def __init__(
        self,
        host: str,
        address: str,
        own: KeyPair,
        managers: Sequence[str],
        token: str,
        tls: ssl.SSLContext,
        apply: Callable[[], Callable[[], None]],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
        succession: Succession | None = None,
    ) -> None:
        self._host = host
        self._address = address
        self._own = own
        self._managers = [url.rstrip("/") for url in managers]
        self._headers = {"Authorization": f"Bearer {token}"}
        self._tls = tls
        self._apply = apply
        self._now = now
        self._succession = succession
        #: A renewed certificate lies in its file, and the one before is still in use.
        self._pending = False
        #: Of those that do not count yet, the one that begins first: when, until when, and its text.
        self._later: tuple[datetime.datetime, datetime.datetime, str] | None = None

    async def run(self) -> None:
        """Renew whenever it is time."""
        told = ""
        while True:
            try:
                await self.look()
                told = ""
            except PlaceError as error:
                # It stays so until somebody changes it, as where the service's unit keeps the place from being written.
                if str(error) != told:
                    told = str(error)
                    log.warning("the certificate cannot be renewed", certificate=str(self._own.certificate), why=told)
            except (AccessError, OSError, ValueError) as error:
                log.warning("the certificate was not renewed", certificate=str(self._own.certificate), why=str(error))
            await asyncio.sleep(EVERY_S)

    async def look(self) -> bool:
        """Renew the certificate if it is time, or another CA is to sign it; whether it was.

        :raises PlaceError: it was time, and no manager was asked, since the certificate could not be kept.
        :raises AccessError, OSError: it was time, and failed.
        :raises ValueError: there is no certificate for such an address.
        """
        if self._pending:
            # By its file alone it would never be time again, until the one in use has expired.
            await self._take_into_use()
            return True
        of_another = await self._is_of_another()
        found = await asyncio.to_thread(load, self._own.certificate)
        if not of_another and not due(found.not_valid_before_utc, found.not_valid_after_utc, self._now()):
            return False
        await asyncio.to_thread(check_place, self._own.certificate)
        signer = self._succession.signer if self._succession is not None else None
        body = RenewalRequest(csr=await asyncio.to_thread(self._request), address=self._address, ca=signer)
        failures = []
        for manager in self._managers:
            try:
                renewed = await self._ask(manager, body)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                failures.append(f"{manager}: {error or type(error).__name__}")
                continue
            return await self._take(renewed)
        if self._later is not None and counts(*self._later[:2], self._now()):
            # Where this clock is behind, each new one begins later.
            return await self._take(self._later[2])
        left = (found.not_valid_after_utc - self._now()).total_seconds() / 86_400
        lasts = f"it is valid for {left:.1f} days more" if left > 0 else f"it has ended {-left:.1f} days ago"
        raise AccessError(f"{'; '.join(failures)}; {lasts}")

    async def _is_of_another(self) -> bool:
        """Whether another CA is to sign the certificate by now than the one that has."""
        if self._succession is None:
            return False
        try:
            return await self._succession.look()
        except (AccessError, OSError) as error:
            log.warning("the CA that follows was not taken over", why=str(error))
            return False

    async def _take(self, renewed: str) -> bool:
        await asyncio.to_thread(replace, self._own.certificate, renewed)
        self._later = None
        await self._take_into_use()
        return True

    async def _take_into_use(self) -> None:
        self._pending = True
        try:
            (await asyncio.to_thread(self._apply))()
        except AccessError as error:
            raise AccessError(f"the renewed one is there, but not in use: {error}") from error
        self._pending = False
        ends = (await asyncio.to_thread(load, self._own.certificate)).not_valid_after_utc
        log.info("certificate renewed", certificate=str(self._own.certificate), until=ends.isoformat())

    def _request(self) -> str:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            return request_of(load_pem_private_key(self._own.key.read_bytes(), None), self._host)
        except (ValueError, TypeError) as error:
            raise AccessError(f"cannot use the key {self._own.key}: {error}") from error

    async def _ask(self, manager: str, body: RenewalRequest) -> str:
        """Raises ValueError where the manager refuses, or answers one that does not count."""
        from cryptography import x509

        try:
            url = f"{manager}/v1/hosts/{self._host}/certificate"
            renewed = (await ask(self._tls, url, Renewal, body, **self._headers)).certificate
        except Refused as refused:
            raise ValueError(f"{refused}: {refused.text[:300]}") from refused
        found = x509.load_pem_x509_certificate(renewed.encode())
        begins, ends, now = found.not_valid_before_utc, found.not_valid_after_utc, self._now()
        # The present one is kept until another counts: with one of next month nobody could ask again.
        if not counts(begins, ends, now):
            if begins > now and (self._later is None or self._later[1] <= now or begins < self._later[0]):
                self._later = begins, ends, renewed
            said = f"it answers a certificate that counts from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC"
            raise ValueError(f"{said}, not now: look at the clocks of its machine and of this one")
        return renewed

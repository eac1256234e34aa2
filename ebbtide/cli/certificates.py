"""A CA and certificates for mutual TLS in a lab. Needs the extra ``certificates``."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from pydantic import TypeAdapter, ValidationError

from cluster_manager.authority import signed
from ebbtide.errors import EbbError
from ebbtide.lab.state import write_private
from ebbtide.messages.common import Name
from ebbtide.rest.errors import AccessError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

#: A CA lasts as long as a cluster may: what it has signed ends with it, and no host renews it.
CA_DAYS: Final = 3650
#: The common name by which host agents know their manager.
MANAGER = "ebb-manager"
_CA = "ca"


@dataclass(frozen=True, slots=True)
class Purpose:
    """Whose certificate: its common name, and the names and addresses where it listens."""

    name: str
    addresses: tuple[str, ...]

    @classmethod
    def manager(cls, addresses: Iterable[str]) -> Self:
        return cls(MANAGER, tuple(addresses))

    @classmethod
    def host(cls, text: str) -> Self:
        """:param text: ``ID`` or ``ID=ADDRESS``; without an address the host is reached by its id. Raises EbbError."""
        name, _, address = text.partition("=")
        try:
            TypeAdapter(Name).validate_python(name)
        except ValidationError:
            raise EbbError(f"{name!r} is no name of a host: lower-case letters, digits and hyphens, 1 to 40") from None
        if name in (MANAGER, _CA):
            raise EbbError(f"no host may be called {name}: its certificate would be taken for another one's")
        return cls(name, (address or name,))


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA in a directory: ``ca.pem`` and ``ca.key``."""

    directory: Path
    certificate: x509.Certificate
    key: EllipticCurvePrivateKey

    @classmethod
    def in_directory(cls, directory: Path, days: int) -> Self:
        """The one that is there, else a new one.

        :param days: what it is to sign is valid for so long.
        :raises EbbError: it cannot be read or written, or ends before that.
        """
        _need_cryptography()
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            directory.mkdir(parents=True, exist_ok=True)
            if (directory / "ca.pem").exists():
                certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
                key = load_pem_private_key((directory / "ca.key").read_bytes(), None)
                if not isinstance(key, ec.EllipticCurvePrivateKey):
                    raise EbbError(f"{directory / 'ca.key'} is not a key that `ebb certificates` made")
                _check_left(directory, certificate, days)
                return cls(directory, certificate, key)
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _signed(None, key, key, Purpose("Ebbtide CA", ()), max(days, CA_DAYS))
            _write(directory / _CA, certificate, key)
        except (OSError, ValueError) as error:
            raise EbbError(f"the CA in {directory} cannot be used: {error}") from error
        return cls(directory, certificate, key)


def _check_left(directory: Path, certificate: x509.Certificate, days: int) -> None:
    """:raises EbbError: a CA ends in less than so many days."""
    ends = certificate.not_valid_after_utc
    left = (ends - datetime.datetime.now(datetime.UTC)).days
    if left >= days:
        return
    fewer = f"give --days {left} or less, or " if left > 0 else ""
    raise EbbError(
        f"the CA in {directory} is valid until {ends:%Y-%m-%d}, not for {days} days: {fewer}make a new one in another "
        "directory, and from it the certificates of the manager and of all hosts (docs/reference/security.md)"
    )


def make_certificates(authority: Authority, purposes: Sequence[Purpose], days: int) -> list[Path]:
    """Write ``NAME.pem`` and ``NAME.key`` for each, in the place of older ones. Raises EbbError."""
    from cryptography.hazmat.primitives.asymmetric import ec

    made = []
    for purpose in purposes:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(authority.certificate, authority.key, key, purpose, days)
        stem = authority.directory / purpose.name
        try:
            _write(stem, certificate, key)
        except OSError as error:
            raise EbbError(f"{stem}.pem cannot be written: {error.strerror}") from error
        made.append(stem.with_name(f"{stem.name}.pem"))
    return made


def _signed(
    issuer: x509.Certificate | None,
    signer: EllipticCurvePrivateKey,
    key: EllipticCurvePrivateKey,
    purpose: Purpose,
    days: int,
) -> x509.Certificate:
    try:
        return signed(key.public_key(), issuer, signer, purpose.name, purpose.addresses, datetime.timedelta(days=days))
    except AccessError as error:
        raise EbbError(str(error)) from None


def _write(stem: Path, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # Both are whole before the first is put in its place: what fails leaves the pair that was there.
    descriptor, fresh = tempfile.mkstemp(dir=stem.parent, prefix=f".{stem.name}.pem.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(certificate.public_bytes(Encoding.PEM))
            os.fchmod(descriptor, 0o644)
        write_private(stem.with_name(f"{stem.name}.key"), secret.decode())
        Path(fresh).replace(stem.with_name(f"{stem.name}.pem"))
    finally:
        Path(fresh).unlink(missing_ok=True)


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise EbbError("this needs the package cryptography: pip install 'ebbtide[certificates]'") from None

"""A CA and certificates for mutual TLS in a lab. Needs the extra ``certificates``."""

from __future__ import annotations

import contextlib
import datetime
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from pydantic import TypeAdapter, ValidationError

from cluster_manager.authority import CertificateAuthority, signed
from ebbtide.errors import EbbError
from ebbtide.extras import installing
from ebbtide.files import replacing
from ebbtide.lab.state import write_private
from ebbtide.messages.common import Name
from ebbtide.rest.errors import AccessError
from ebbtide.rest.tls import fingerprint

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

#: A CA lasts as long as a cluster may: what it has signed ends with it, and no host renews it.
CA_DAYS: Final = 3650
#: And what it signs, unless another time is said.
DAYS: Final = 365
#: The common name by which host agents know their manager.
MANAGER = "ebb-manager"
_CA = "ca"
#: A CA that is to follow, and one that was followed.
_NEXT = "next-ca"
_OLD = "old-ca"


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
        if name in (MANAGER, _CA, _NEXT, _OLD):
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
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if (directory / "ca.pem").exists():
                return cls._read(directory, _CA, days)
            return cls._made(directory, _CA, "Ebbtide CA", max(days, CA_DAYS))
        except (OSError, ValueError) as error:
            raise EbbError(f"the CA in {directory} cannot be used: {error}") from error

    @classmethod
    def following(cls, directory: Path, days: int) -> Self | None:
        """The one that is to follow the one in a directory; None: none is. Raises EbbError."""
        _need_cryptography()
        try:
            return cls._read(directory, _NEXT, days) if (directory / f"{_NEXT}.pem").exists() else None
        except (OSError, ValueError) as error:
            raise EbbError(f"the CA that is to follow in {directory} cannot be used: {error}") from error

    @classmethod
    def _made(cls, directory: Path, stem: str, name: str, days: int) -> Self:
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(None, key, key, Purpose(name, ()), days)
        _write(directory / stem, certificate, key)
        return cls(directory, certificate, key)

    @classmethod
    def _read(cls, directory: Path, stem: str, days: int) -> Self:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        found = x509.load_pem_x509_certificates((directory / f"{stem}.pem").read_bytes())
        key = load_pem_private_key((directory / f"{stem}.key").read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise EbbError(f"{directory / stem}.key is not a key that `ebb certificates` made")
        certificate = next((one for one in found if one.public_key() == key.public_key()), None)
        if certificate is None:
            raise EbbError(f"{directory / stem}.key is not the key of {directory / stem}.pem")
        _check_left(directory, certificate, days)
        return cls(directory, certificate, key)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its certificate, hexadecimal."""
        return fingerprint(self.certificate)


def begin_rollover(directory: Path) -> None:
    """Make the CA that is to follow the one in a directory; both are in ``ca.pem`` from then on. Raises EbbError."""
    if not (directory / "ca.pem").exists():
        raise EbbError(f"there is no CA in {directory}: `ebb certificates` makes one")
    Authority.in_directory(directory, 1)
    try:
        following = Authority.following(directory, 1)
        present = (directory / "ca.pem").read_bytes()
        if following is None:
            today = datetime.datetime.now(datetime.UTC).date()
            following = Authority._made(directory, _NEXT, f"Ebbtide CA of {today}", CA_DAYS)
        # Who reads the one is to read the other, also where this was broken off here.
        for end in ("pem", "key"):
            _as_before(directory / f"{_NEXT}.{end}", (directory / f"ca.{end}").stat())
        pem = CertificateAuthority(following.certificate, following.key).pem.encode()
        if pem in present:
            raise EbbError(f"{directory / _NEXT}.pem is to follow already: `ebb ca finish` drops the one before")
        _replace(directory / "ca.pem", present.rstrip(b"\n") + b"\n" + pem)
    except (OSError, ValueError) as error:
        raise EbbError(f"no CA that is to follow could be made in {directory}: {error}") from error


def still_counts(directory: Path, following: Authority) -> bool:
    """Whether a CA in a directory that is to be dropped has not ended yet. Raises EbbError."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates((directory / "ca.pem").read_bytes())
    except (OSError, ValueError) as error:
        raise EbbError(f"the CA in {directory} cannot be used: {error}") from error
    now = datetime.datetime.now(datetime.UTC)
    return any(one.not_valid_after_utc > now for one in found if one != following.certificate)


def has_begun(directory: Path) -> bool:
    """Whether `finish_rollover` was broken off when the next CA's key had its place already. Raises EbbError."""
    try:
        return (directory / "ca.key").read_bytes() == (directory / f"{_NEXT}.key").read_bytes()
    except OSError as error:
        raise EbbError(f"the CA in {directory} cannot be used: {error}") from error


def finish_rollover(directory: Path, following: Authority, days: int) -> list[Path]:
    """Put the CA that is to follow into the place of the one before, with a certificate of the manager's from it.

    Broken off, it can be called again. Raises EbbError.
    """
    from cryptography import x509

    own = directory / f"{MANAGER}.pem"
    try:
        names = x509.load_pem_x509_certificate(own.read_bytes()).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
        addresses = [
            *names.value.get_values_for_type(x509.DNSName),
            *map(str, names.value.get_values_for_type(x509.IPAddress)),
        ]
        made = make_certificates(following, [Purpose.manager(addresses)], days)
        # The key first: by it the right one is found among the certificates.
        for end in ("key", "pem"):
            present, text = directory / f"ca.{end}", (directory / f"{_NEXT}.{end}").read_bytes()
            if (before := present.read_bytes()) != text:
                _replace(directory / f"{_OLD}.{end}", before, present.stat())
                _replace(present, text)
        # The certificate first: while it is there, one is to follow, and that needs its key.
        for end in ("pem", "key"):
            (directory / f"{_NEXT}.{end}").unlink()
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise EbbError(f"the CA in {directory} is not followed yet: {error}") from error
    return made


def _check_left(directory: Path, certificate: x509.Certificate, days: int) -> None:
    """:raises EbbError: a CA ends in less than so many days."""
    ends = certificate.not_valid_after_utc
    left = (ends - datetime.datetime.now(datetime.UTC)).days
    if left >= days:
        return
    fewer = f"give --days {left} or less, or " if left > 0 else ""
    if (directory / f"{_NEXT}.pem").exists():
        other = f"drop it by `ebb ca finish {directory}`"
    else:
        other = (
            "make one that is to follow by `ebb ca next`; where it has ended already, a new one in another directory, "
            "and from it the certificates of the manager and of all hosts (docs/reference/security.md)"
        )
    raise EbbError(f"the CA in {directory} is valid until {ends:%Y-%m-%d}, not for {days} days: {fewer}{other}")


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
    at = stem.with_name(f"{stem.name}.key")
    before = at.stat() if at.exists() else None

    def write_key() -> None:
        write_private(at, secret.decode())
        if before is not None:
            # The manager's own user reads it by its group.
            _as_before(at, before)

    # Both are whole before the first is put in its place: what fails leaves the pair that was there.
    _replace(stem.with_name(f"{stem.name}.pem"), certificate.public_bytes(Encoding.PEM), then=write_key)


def _replace(
    path: Path, data: bytes, like: os.stat_result | None = None, then: Callable[[], object] = lambda: None
) -> None:
    """Put a whole file into a place, with owner and mode of the one that is there, or of another one.

    :param then: done when the file is whole, before it is put there.
    """
    if like is None and path.exists():
        like = path.stat()
    with replacing(path, durable=False) as file:
        file.write(data)
        # A key and its certificate are put into their places in an order that must outlast a loss of power.
        file.flush()
        os.fsync(file.fileno())
        if like is None:
            os.chmod(file.fileno(), 0o644)
        else:
            _as_before(file.fileno(), like)
        then()


def _as_before(file: Path | int, model: os.stat_result) -> None:
    # Whose files of others are is not for everybody to say.
    with contextlib.suppress(PermissionError):
        os.chown(file, model.st_uid, model.st_gid)
    os.chmod(file, stat.S_IMODE(model.st_mode))


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise EbbError(f"this needs the package cryptography: {installing('certificates')}") from None

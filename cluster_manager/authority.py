"""The cluster's certificate authority: signs what hosts ask for. Needs the extra ``certificates``.

Of a request (PKCS #10) only the public key counts: subject, names and uses are the manager's word.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from ebbtide.extras import installing
from ebbtide.messages.enrolment import SUCCESSOR_NAME
from ebbtide.rest.errors import AccessError
from ebbtide.rest.tls import fingerprint, issued_by
from ebbtide.rest.tokens import check_private

if TYPE_CHECKING:
    from cryptography import x509

#: Clocks differ.
EARLIER: Final = datetime.timedelta(minutes=10)
#: Bits of an RSA key.
_LEAST_RSA: Final = 2048


@dataclass(frozen=True, slots=True)
class CertificateAuthority:
    """A CA and its key.

    :param own: what stands in the certificate of the manager that signs: common names, names and addresses.
    :param following: the CA that is to follow this one.
    :param proof: this one's word for that, PEM; empty where it has ended.
    """

    certificate: x509.Certificate
    key: Any
    own: frozenset[str] = frozenset()
    following: CertificateAuthority | None = None
    proof: str = ""

    @classmethod
    def load(cls, certificate: Path, key: Path, own: Path | None = None, next_key: Path | None = None) -> Self:
        """The CA of a key among the certificates in a file.

        :param next_key: of the one among them that is to follow; none is where it is the present one's, or where there
            is but one and this file is gone.
        :raises AccessError: a file cannot be read, or a key belongs to no certificate.
        """
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives.serialization import load_pem_private_key
        except ImportError:
            raise AccessError(f"--ca-key needs the package cryptography: {installing('certificates')}") from None
        try:
            found = x509.load_pem_x509_certificates(certificate.read_bytes())
            names = names_in(own.read_bytes()) if own is not None else frozenset()
            made = []
            for path in (key, next_key):
                if path is not None and not (path is next_key and len(found) == 1 and _is_gone(path)):
                    check_private(path, "key")
                    secret = load_pem_private_key(path.read_bytes(), None)
                    its = next((one for one in found if one.public_key() == secret.public_key()), None)
                    if its is None:
                        raise AccessError(f"{path} is not the key of {certificate}")
                    made.append(cls(its, secret, names))
        except OSError as error:
            raise AccessError(f"cannot read {error.filename}: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise AccessError(f"cannot use {certificate} with {key}: {error}") from error
        present, *following = made
        # It may have followed already, at another manager, or here where `ebb ca finish` was broken off.
        if not following or following[0].certificate == present.certificate:
            return present
        # Nobody would believe the word of one that has ended.
        proof = "" if present.has_ended() else present._word_for(following[0])
        return replace(present, following=following[0], proof=proof)

    def _word_for(self, other: CertificateAuthority) -> str:
        """A certificate of another CA's key, signed by this one. Its name is nobody's, and it is none of a CA: nothing
        is believed by it but that this CA means the other one to follow.
        """
        from cryptography.hazmat.primitives.serialization import Encoding

        lifetime = self.certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        made = signed(other.key.public_key(), self.certificate, self.key, SUCCESSOR_NAME, (), lifetime)
        return made.public_bytes(Encoding.PEM).decode()

    def has_signed(self, certificate: bytes) -> bool:
        """Whether a certificate, DER, is one of its."""
        from cryptography import x509

        try:
            return issued_by(x509.load_der_x509_certificate(certificate), self.certificate)
        except ValueError:
            return False

    @property
    def pem(self) -> str:
        """Its certificate."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return self.certificate.public_bytes(Encoding.PEM).decode()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its certificate, hexadecimal."""
        return fingerprint(self.certificate)

    def has_ended(self) -> bool:
        """Whether nobody believes what it signs any more."""
        return self.certificate.not_valid_after_utc <= datetime.datetime.now(datetime.UTC)

    def answer(self, request: str, name: str, addresses: Iterable[str], days: float) -> str:
        """The certificate for a request, PEM.

        :param name: the common name; the request must have the same, and no other part of a subject.
        :raises AccessError: the request is damaged, of somebody else, or has a key that is too weak.
        """
        from cryptography.hazmat.primitives.serialization import Encoding

        public = public_key_of(request, name)
        made = signed(public, self.certificate, self.key, name, addresses, datetime.timedelta(days=days))
        return made.public_bytes(Encoding.PEM).decode()


def public_key_of(request: str, name: str) -> Any:
    """The public key in a request for a certificate of a name. Raises AccessError."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.x509.oid import NameOID

    try:
        read = x509.load_pem_x509_csr(request.encode())
        names = [(part.oid, part.value) for part in read.subject]
        public, good = read.public_key(), read.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise AccessError(f"it cannot be read: {error}") from None
    if not good:
        raise AccessError("it is not signed by the key that is in it")
    if names != [(NameOID.COMMON_NAME, name)]:
        raise AccessError(f"its subject must be the common name {name} and nothing else")
    if isinstance(public, rsa.RSAPublicKey) and public.key_size < _LEAST_RSA:
        raise AccessError(f"an RSA key must have {_LEAST_RSA} bits")
    if not isinstance(public, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey):
        raise AccessError("its key must be EC, Ed25519 or RSA")
    return public


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    return False


def names_in(pem: bytes) -> frozenset[str]:
    """The common names, names and addresses in a certificate. Raises ValueError: it is none."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    certificate = x509.load_pem_x509_certificate(pem)
    names = [str(part.value) for part in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    with suppress(x509.ExtensionNotFound):
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names += [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]
    return frozenset(map(plain_address, names))


def plain_address(address: str) -> str:
    """The one way to write a name or an IP address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address.lower()
    return str(getattr(found, "ipv4_mapped", None) or found)


def fingerprint_of(public: Any) -> str:
    """SHA-256 of a public key, hexadecimal."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def signed(
    public: Any,
    issuer: x509.Certificate | None,
    signer: Any,
    name: str,
    addresses: Iterable[str],
    lifetime: datetime.timedelta,
) -> x509.Certificate:
    """A certificate for both directions, since manager and agents call each other; without an issuer, that of a CA.

    It ends with its issuer at the latest: behind that nobody believes it.

    :param addresses: names and IP addresses.
    :raises AccessError: an address is neither, or the issuer has ended.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    is_ca = issuer is None
    ends = now + lifetime
    if issuer is not None:
        if issuer.not_valid_after_utc <= now:
            raise AccessError(f"the CA has expired on {issuer.not_valid_after_utc:%Y-%m-%d}: it signs nothing more")
        ends = min(ends, issuer.not_valid_after_utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer is not None else subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_ca,
                key_cert_sign=is_ca,
                crl_sign=is_ca,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    if not is_ca:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if alternatives := [alternative(address) for address in addresses]:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return builder.sign(signer, hashes.SHA256())


def alternative(address: str) -> x509.GeneralName:
    """A name or an IP address as it stands in a certificate. Raises AccessError: it is neither."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", address):
            raise AccessError(f"{address!r} is neither an IP address nor a name") from None
        return x509.DNSName(address)

"""A CA that follows is trusted by the word of one that is, and by nothing else that a manager may say."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from cluster_manager.authority import CertificateAuthority, signed
from ebbtide.cli.certificates import begin_rollover
from ebbtide.lab.state import write_private
from ebbtide.messages.enrolment import SUCCESSOR_NAME, Authority, Successor
from ebbtide.rest.errors import AccessError
from ebbtide.rest.tls import KeyPair
from hostagent.control.succession import Succession, vouched
from tests.manager.api.test_enrolment_attacks import serving
from tests.rest.pki import Pki

DAY = datetime.timedelta(days=1)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def new_ca(is_ca: bool = True) -> tuple[Any, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    made = signed(key.public_key(), None, key, "another CA", (), DAY)
    if not is_ca:
        made = signed(key.public_key(), made, key, "another CA", (), DAY)
    return key, made


def write_pair(pair: KeyPair, by: CertificateAuthority, name: str) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    made = signed(key.public_key(), by.certificate, by.key, name, ("127.0.0.1",), DAY)
    pair.certificate.write_text(pem(made))
    write_private(pair.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode())


class Cluster:
    """A CA, and one that is to follow it."""

    def __init__(self, directory: Path) -> None:
        self.pki = Pki(directory)
        self.manager = self.pki.pair("ebb-manager")
        self.host = self.pki.pair("host-a")
        self.text = self.pki.ca.read_text()
        begin_rollover(directory)
        self.authority = CertificateAuthority.load(self.pki.ca, directory / "ca.key", None, directory / "next-ca.key")
        following = self.authority.following
        assert following is not None
        self.following = following

    @property
    def offered(self) -> Successor:
        return Successor(ca=self.following.pem, proof=self.authority.proof)

    def word(self, name: str, key: Any, days: int = 1) -> str:
        """What the CA of before signs for a key."""
        lifetime = datetime.timedelta(days=days)
        return pem(signed(key.public_key(), self.authority.certificate, self.authority.key, name, (), lifetime))


@pytest.fixture
def parts(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "tls")


def test_the_ca_that_the_one_before_has_named_is_trusted(parts: Cluster) -> None:
    vouched(parts.offered, [parts.authority.certificate], now())


def test_a_word_for_another_ca_is_no_certificate_of_a_ca_a_host_or_a_manager(parts: Cluster) -> None:
    """A chain over it would make all that the one that follows has signed count where only the first is trusted."""
    proof = x509.load_pem_x509_certificate(parts.authority.proof.encode())
    assert not proof.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert proof.subject.rfc4514_string() == f"CN={SUCCESSOR_NAME}"
    with pytest.raises(x509.ExtensionNotFound):
        proof.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def of_another_ca(parts: Cluster) -> Successor:
    key, ca = new_ca()
    return Successor(ca=pem(ca), proof=pem(signed(key.public_key(), ca, key, SUCCESSOR_NAME, (), DAY)))


def by_a_certificate_of_its_own(parts: Cluster) -> Successor:
    """What a host has got for its key is no word for a CA of that key."""
    key, ca = new_ca()
    return Successor(ca=pem(ca), proof=parts.word("host-b", key))


def by_the_word_for_another_key(parts: Cluster) -> Successor:
    return Successor(ca=pem(new_ca()[1]), proof=parts.authority.proof)


def of_what_is_no_ca(parts: Cluster) -> Successor:
    key, ca = new_ca(is_ca=False)
    return Successor(ca=pem(ca), proof=parts.word(SUCCESSOR_NAME, key))


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (of_another_ca, "no CA that is trusted here vouches for it"),
        (by_a_certificate_of_its_own, "the word for it is a certificate of something else"),
        (by_the_word_for_another_key, "the word for it is about another key"),
        (of_what_is_no_ca, "it is no CA"),
    ],
)
def test_whoever_speaks_as_the_manager_has_hosts_trust_no_ca_without_the_key_of_the_one_before(
    parts: Cluster, attack: Callable[[Cluster], Successor], why: str
) -> None:
    with pytest.raises(AccessError, match=why):
        vouched(attack(parts), [parts.authority.certificate], now())


@pytest.mark.parametrize("days", [-2, 4000])
def test_a_word_counts_only_in_its_time(parts: Cluster, days: int) -> None:
    with pytest.raises(AccessError, match="a certificate has ended, or not begun"):
        vouched(parts.offered, [parts.authority.certificate], now() + days * DAY)


# --- the host's files ------------------------------------------------------------------------------------------------


class Host:
    """A host's files, and a manager that says what a test has it say."""

    def __init__(self, directory: Path, parts: Cluster) -> None:
        directory.mkdir()
        self.ca = directory / "ca.pem"
        self.ca.write_text(parts.text)
        self.own = KeyPair(directory / "host.pem", directory / "host.key")
        self.own.certificate.write_bytes(parts.host.certificate.read_bytes())
        write_private(self.own.key, parts.host.key.read_text())
        self.parts = parts
        self.says: dict[str, str] = {}
        self.applied = 0

    def apply(self) -> Callable[[], None]:
        self.applied += 1
        return lambda: None

    async def answer(self, request: web.Request) -> web.Response:
        text = self.says.get(request.path)
        return web.Response(text=text, status=200 if text is not None else 404)

    async def look(self, *managers: KeyPair) -> tuple[bool, str | None]:
        """What a look comes to, and the CA that is to sign from then on; managers with these certificates are there."""
        async with contextlib.AsyncExitStack() as stack:
            urls = []
            for own in managers:
                application = web.Application()
                application.router.add_get("/{any:.*}", self.answer)
                urls.append(await stack.enter_async_context(serving(application, own)))
            both = self.parts.pki.client(self.own)
            succession = Succession(self.ca, self.own, urls, both, self.apply, "ebb-manager")
            return await succession.look(), succession.signer

    def renew(self) -> None:
        """It has got a certificate of the CA that follows."""
        write_pair(self.own, self.parts.following, "host-a")


@pytest.fixture
def host(tmp_path: Path, parts: Cluster) -> Host:
    return Host(tmp_path / "host", parts)


async def test_where_nothing_is_to_follow_nothing_changes(host: Host, parts: Cluster) -> None:
    assert await host.look(parts.manager) == (False, None)
    assert (host.ca.read_text(), host.applied) == (parts.text, 0)


async def test_a_ca_that_follows_stands_beside_the_one_before_until_the_manager_has_a_certificate_of_it(
    host: Host, parts: Cluster, tmp_path: Path
) -> None:
    host.ca.chmod(0o644)
    host.says = {
        "/v1/ca/next": parts.offered.model_dump_json(),
        "/v1/ca": Authority(ca=parts.authority.pem).model_dump_json(),
    }
    for _ in range(2):
        assert await host.look(parts.manager) == (True, parts.following.fingerprint)
    assert (host.ca.read_text(), host.applied) == (parts.text + parts.following.pem, 1)
    assert host.ca.stat().st_mode & 0o777 == 0o644
    host.renew()
    # The next one is to be of it, too.
    assert await host.look(parts.manager) == (False, parts.following.fingerprint)
    # The one that follows signs by now, says who has a certificate of the one before: it may be a rogue manager.
    host.says = {"/v1/ca": Authority(ca=parts.following.pem).model_dump_json()}
    assert await host.look(parts.manager) == (False, parts.following.fingerprint)
    assert host.ca.read_text() == parts.text + parts.following.pem
    # A certificate of the one that follows, which signs no host: not yet.
    new = KeyPair(tmp_path / "new.pem", tmp_path / "new.key")
    write_pair(new, parts.following, "ebb-manager")
    host.says = {"/v1/ca": Authority(ca=parts.authority.pem).model_dump_json()}
    assert await host.look(new) == (False, parts.following.fingerprint)
    assert host.applied == 1
    host.says = {"/v1/ca": Authority(ca=parts.following.pem).model_dump_json()}
    # Nor while a standby shows one of the CA before.
    for managers in ((new, parts.manager), (parts.manager, new)):
        assert await host.look(*managers) == (False, parts.following.fingerprint)
    assert host.applied == 1
    assert await host.look(new) == (False, None)
    assert (host.ca.read_text(), host.applied) == (parts.following.pem, 2)
    assert not list(host.ca.parent.glob("*.before"))


async def test_a_ca_that_is_not_named_by_the_one_before_is_said_and_changes_nothing(host: Host, parts: Cluster) -> None:
    host.says = {"/v1/ca/next": of_another_ca(parts).model_dump_json()}
    with pytest.raises(AccessError, match="is not trusted: no CA that is trusted here vouches for it"):
        await host.look(parts.manager)
    assert (host.ca.read_text(), host.applied) == (parts.text, 0)


async def test_what_an_operator_has_put_there_is_taken_for_what_it_is(host: Host, parts: Cluster) -> None:
    """As `ca.pem` is at the manager by then; or as it is at the end."""
    host.says = {"/v1/ca/next": parts.offered.model_dump_json()}
    host.ca.write_text(parts.text + parts.following.pem)
    assert await host.look(parts.manager) == (True, parts.following.fingerprint)
    assert host.ca.read_text() == parts.text + parts.following.pem
    assert host.ca.with_name("ca.pem.before").read_text() == parts.text
    host.ca.with_name("ca.pem.before").unlink()
    host.ca.write_text(parts.following.pem)
    assert await host.look(parts.manager) == (False, None)
    assert host.ca.read_text() == parts.following.pem


async def test_another_ca_that_is_to_follow_takes_the_place_of_the_first_one(host: Host, parts: Cluster) -> None:
    host.says = {"/v1/ca/next": parts.offered.model_dump_json()}
    await host.look(parts.manager)
    key, ca = new_ca()
    other = Successor(ca=pem(ca), proof=parts.word(SUCCESSOR_NAME, key))
    host.says = {"/v1/ca/next": other.model_dump_json()}
    await host.look(parts.manager)
    assert host.ca.read_text() == parts.text + pem(ca)

"""Enrolment of hosts: invitations that work once, certificates and their renewal, revocation.

What was invited and revoked is a document in the store. Of an invitation's token only its SHA-256 is kept. One that has
been used answers the same host key again until it expires, so that a lost answer costs no second invitation.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import urlsplit

import structlog

from cluster_manager.authority import (
    CertificateAuthority,
    alternative,
    fingerprint_of,
    names_in,
    plain_address,
    public_key_of,
)
from cluster_manager.errors import RequestError, not_configured
from cluster_manager.store.enrolled import NAME, Enrolled, Invited, read_enrolled
from cluster_manager.store.store import Store
from ebbtide.messages.common import NAME_PATTERN
from ebbtide.messages.enrolment import (
    Enrolment,
    EnrolmentRequest,
    Invitation,
    InvitationRequest,
    Renewal,
    RenewalRequest,
    Revocation,
    Rollover,
    Successor,
    VoidedInvitations,
)
from ebbtide.rest.credentials import command_token, report_token
from ebbtide.rest.errors import AccessError
from ebbtide.rest.rates import Buckets, Rate
from ebbtide.rest.tls import is_everywhere, is_loopback

log = structlog.get_logger()

#: So many wait for their hosts at a time.
MOST_INVITATIONS: Final = 1000
#: Common names of others.
RESERVED: Final = frozenset({"ebb-manager", "ca"})
#: How long a name of a host may take to be looked up.
_LOOKED_UP_S: Final = 2.0
#: Strangers without an invitation, and renewals of one host, that are told in the log: neither can fill a disk.
_TOLD: Final = Rate(per_s=0.1, burst=10.0)


class Enrolments:
    """Of one term of a manager.

    :param authority: None: this manager signs no certificates.
    :param url: where hosts reach it; None: it is not known.
    :param days: for how long certificates are valid.
    :param is_known: whether a host of this id has ever reported.
    :param lost: hosts that were revoked otherwise than by request.
    :param clock: seconds since the epoch.
    :param certificates: those in force, PEM, the manager's own first; another one may come while it runs.
    """

    def __init__(
        self,
        store: Store,
        hosts_key: str,
        authority: CertificateAuthority | None,
        url: str | None,
        days: float,
        is_known: Callable[[str], bool],
        clock: Callable[[], float],
        lost: Callable[[], frozenset[str]] = frozenset,
        certificates: Callable[[], tuple[bytes, ...]] = tuple,
    ) -> None:
        self._store = store
        self._hosts_key = hosts_key
        self._authority = authority
        self._url = url
        self._days = days
        self._is_known = is_known
        self._clock = clock
        self._lost = lost
        self._certificates = certificates
        self._known = Enrolled()
        self._told = Buckets()
        #: Where managers were reached that have led.
        self._leaders: frozenset[str] = frozenset()
        #: Where hosts report: to this one, or to one of those.
        self._managers: tuple[str, ...] = ()
        #: What each host's certificate was last, by its SHA-256, and whether the CA that is to follow has signed it.
        self._shown: dict[str, tuple[bytes, bool]] = {}
        #: What is read is written before anyone else reads it.
        self._turn = asyncio.Lock()

    async def recall(self) -> None:
        """What was invited and revoked before this term. Raises StoreError."""
        # Of earlier versions: where one listens on all addresses nobody is called.
        urls = {url for url in await self._store.leaders() if not is_everywhere(urlsplit(url).hostname or "")}
        self._leaders = frozenset(plain_address(host) for url in urls if (host := urlsplit(url).hostname))
        if self._url is not None:
            others = sorted(url for url in urls - {self._url} if _kind_of(url) == _kind_of(self._url))
            self._managers = (self._url, *others)
        self._known = read_enrolled(await self._store.knowledge(NAME))

    @property
    def revoked(self) -> frozenset[str]:
        """The hosts that were revoked by request."""
        return frozenset(self._known.revoked)

    @property
    def authority(self) -> CertificateAuthority:
        """:raises RequestError: 409, there is none."""
        if self._authority is None:
            raise not_configured("this manager signs no certificates: it was started without --ca-key")
        return self._authority

    def _reached_at(self) -> str:
        """Where hosts reach it. Raises RequestError: 409, nobody knows."""
        if self._url is None:
            raise not_configured("this manager does not know where hosts reach it: start it with --url")
        return self._url

    async def invite(self, request: InvitationRequest) -> Invitation:
        """Make an invitation. Raises RequestError."""
        url = self._reached_at()
        if request.host is not None:
            self._check_host(request.host)
        secure = url.startswith("https://")
        fingerprint = f".{self.authority.fingerprint}" if secure else ""
        # Hexadecimal: it is a word of a command, which must not begin with a hyphen.
        token, now = secrets.token_hex(32), self._clock()
        invited = Invited(sha256=_digest(token), host=request.host, expires_at=now + request.expires_s)
        async with self._turn:
            waiting = sum(one.expires_at > now and one.used_by is None for one in self._known.invitations)
            if waiting >= MOST_INVITATIONS:
                raise RequestError(409, f"{waiting} invitations wait for their hosts, which is the most")
            # Who has used one has an id's tokens, reported or not.
            left = tuple(one for one in self._known.invitations if one.expires_at > now or self._is_on_its_way(one))
            await self._save(self._known.model_copy(update={"invitations": (*left, invited)}))
        log.info("host invited", host=request.host or "any new one", expires_s=request.expires_s)
        return Invitation(token=token + fingerprint, url=url, host=request.host, expires_at=invited.expires_at)

    async def void(self) -> VoidedInvitations:
        """Have no invitation count any more that nobody has used. Raises StoreError."""
        async with self._turn:
            used = tuple(one for one in self._known.invitations if one.used_by is not None)
            count = sum(one.expires_at > self._clock() and one.used_by is None for one in self._known.invitations)
            await self._save(self._known.model_copy(update={"invitations": used}))
        log.warning("invitations taken back", count=count)
        return VoidedInvitations(count=count, sentence=f"{count} invitations that nobody had used count no more")

    async def enrol(self, request: EnrolmentRequest, from_here: bool = False, remote: str | None = None) -> Enrolment:
        """Take a host in. Raises RequestError: 403 the invitation does not count, 400 the request is not good.

        :param from_here: the request came from this very machine.
        :param remote: the address from which it came.
        """
        secure = self._reached_at().startswith("https://")
        key, certificate, digest = None, None, _digest(request.token)
        # By a manager's address come also guests behind its machine: the invitation must mean the host.
        named = secure and any(
            (one.sha256, one.host) == (digest, request.host) and one.expires_at > self._clock()
            for one in self._known.invitations
        )
        # Before its turn: a revocation waits for no DNS.
        refusal = "" if from_here else await self._refusal(request.host, request.address, remote, named)
        async with self._turn:
            now = self._clock()
            invited = next((one for one in self._known.invitations if one.sha256 == digest), None)
            if invited is None or invited.expires_at <= now:
                if not self._told.take("log", _TOLD, now):
                    log.warning("a host came with no invitation that counts", host=request.host)
                raise RequestError(403, "token: this invitation was never made, or has expired", "token")
            if invited.host not in (None, request.host):
                raise RequestError(403, f"token: this invitation is for {invited.host}", "token")
            if secure:
                if request.csr is None:
                    raise RequestError(400, "csr: is missing: this manager's hosts have certificates", "csr")
                key = fingerprint_of(await self._key_of(request.csr, request.host))
            if invited.used_by is not None and (invited.used_by, invited.key) != (request.host, key):
                raise RequestError(403, f"token: this invitation was used by {invited.used_by} already", "token")
            self._check_host(request.host)
            if invited.host is None and invited.used_by is None and self._is_taken(request.host):
                sentence = f"host: there is a host {request.host} already, or it is invited"
                raise RequestError(409, f"{sentence}; to enrol it again invite it by its name", "host")
            if secure and request.csr is not None:
                certificate = await self._sign(request.csr, request.host, request.address, refusal, self.authority)
            used = invited.model_copy(update={"used_by": request.host, "key": key})
            rest = tuple(used if one is invited else one for one in self._known.invitations)
            await self._save(self._known.model_copy(update={"invitations": rest}))
        log.info("host enrolled", host=request.host, address=request.address)
        return Enrolment(
            host=request.host,
            command_token=command_token(self._hosts_key, request.host),
            report_token=report_token(self._hosts_key, request.host),
            managers=self._managers,
            certificate=certificate,
            ca=self.authority.pem if secure else None,
        )

    async def renew(
        self,
        host: str,
        request: RenewalRequest,
        from_here: bool = False,
        remote: str | None = None,
        named: bool = False,
    ) -> Renewal:
        """The next certificate of a host that has shown its present one. Raises RequestError.

        :param from_here, remote: as of `enrol`.
        :param named: the present one names the address that is asked for.
        """
        refusal = "" if from_here else await self._refusal(host, request.address, remote, named)
        self.refuse_revoked(host)
        if not self._is_there(host):
            raise RequestError(403, f"{host} has neither joined nor reported, or was forgotten since", "id")
        known = {one.fingerprint: one for one in (self.authority, self.following) if one is not None}
        signer = known.get(request.ca) if request.ca is not None else self.authority
        if signer is None:
            raise RequestError(409, "ca: this manager does not sign by this CA", "ca")
        certificate = await self._sign(request.csr, host, request.address, refusal, signer)
        if not self._told.take(f"renewed {host}", _TOLD, self._clock()):
            log.info("certificate renewed", host=host, days=self._days, next_ca=signer is self.following)
        return Renewal(certificate=certificate)

    # --- a CA that is to follow -------------------------------------------------------------------------------------

    @property
    def following(self) -> CertificateAuthority | None:
        """The CA that is to follow; None: none is."""
        return self._authority.following if self._authority is not None else None

    def successor(self) -> Successor:
        """What hosts need to trust it. Raises RequestError: 409, there is none."""
        if (following := self.following) is None:
            raise not_configured("no other CA is to follow")
        if not self.authority.proof:
            said = "the CA has ended, so that it cannot vouch for the one that is to follow: `ebb ca finish` drops it"
            raise not_configured(said)
        return Successor(ca=following.pem, proof=self.authority.proof)

    def note(self, host: str, shown: bytes) -> None:
        """The certificate, DER, with which a host has reported while a CA is to follow."""
        digest, following = hashlib.sha256(shown).digest(), self.following
        if following is not None and self._shown.get(host, (b"",))[0] != digest:
            self._shown[host] = digest, following.has_signed(shown)

    def rollover(self, hosts: Iterable[str]) -> Rollover:
        """How far these hosts are, and those that have joined and not reported yet."""
        if self._authority is None:
            return Rollover(ca=None, next=None, hosts=(), sentence="this manager signs no certificates")
        if (following := self.following) is None:
            sentence = "no other CA is to follow: `ebb ca next` makes one"
            return Rollover(ca=self._authority.fingerprint, next=None, hosts=(), sentence=sentence)
        joined = {one.used_by for one in self._known.invitations if one.used_by is not None}
        every = {*hosts, *joined} - self.revoked - self._lost()
        left = tuple(sorted(host for host in every if not self._shown.get(host, (b"", False))[1]))
        said = f"{len(every) - len(left)} of {len(every)} hosts have a certificate of the CA that is to follow"
        named = f"; not yet: {', '.join(left[:20])}{', ...' if left[20:] else ''}" if left else ", so that it may"
        return Rollover(ca=self._authority.fingerprint, next=following.fingerprint, hosts=left, sentence=said + named)

    async def revoke(self, host: str, reason: str) -> Revocation:
        """From now on nothing of a host counts, and nothing is sent to it: also one that is not known (any more), whose
        tokens would be good for ever.

        :raises RequestError: 404, no host has such an id.
        :raises StoreError: it is not kept.
        """
        if re.fullmatch(NAME_PATTERN, host) is None:
            raise RequestError(404, "no host can have such an id", "id")
        async with self._turn:
            revoked = {host: (self._clock(), reason), **self._known.revoked}
            await self._save(self._known.model_copy(update={"revoked": revoked}))
        log.warning("host revoked", host=host, why=reason)
        sentence = f"{host} is revoked: nothing that it says counts any more, and it is told nothing"
        if not self._is_there(host):
            sentence += f"; no host {host} is known here"
        return Revocation(host=host, sentence=sentence)

    async def forget(self, host: str) -> None:
        """A host that does not come back is not on its way either: its invitation is over. Raises StoreError."""
        async with self._turn:
            self._shown.pop(host, None)
            left = tuple(one for one in self._known.invitations if one.used_by != host)
            if left != self._known.invitations:
                await self._save(self._known.model_copy(update={"invitations": left}))

    def _is_on_its_way(self, one: Invited) -> bool:
        return one.used_by is not None and not self._is_known(one.used_by)

    def has_joined(self, host: str) -> bool:
        """Whether a host has used an invitation that has not expired, or has not reported since it did."""
        return any(one.used_by == host for one in self._known.invitations)

    def _is_there(self, host: str) -> bool:
        return self._is_known(host) or self.has_joined(host)

    def refuse_revoked(self, host: str) -> None:
        """:raises RequestError: 403, this host was revoked."""
        if (found := self._known.revoked.get(host)) is not None:
            raise RequestError(403, f"{host} is revoked: {found[1]}", "id")
        if host in self._lost():
            raise RequestError(403, f"{host} is revoked by the tokens file", "id")

    def _check_host(self, host: str) -> None:
        named = host in self._own()
        if named or host in RESERVED:
            why = ", since the manager's certificate names it: give the host another id (--id)" if named else ""
            raise RequestError(400, f"host: no host may be called {host}{why}", "host")
        if host in self.revoked | self._lost():
            # Its tokens follow from its id: who had them once has them still.
            raise RequestError(409, f"host: {host} is revoked for good; another id is needed", "host")

    def _is_taken(self, host: str) -> bool:
        """Whether an id belongs to a host, or to one that is on its way: whoever has an id has its tokens."""
        now = self._clock()
        return self._is_known(host) or any(
            one.used_by == host or (one.host == host and one.expires_at > now) for one in self._known.invitations
        )

    async def _refusal(self, host: str, address: str, remote: str | None, named: bool) -> str:
        """Why a host that is not on this machine gets no certificate for an address; empty: it does.

        Who reaches the manager by its address alone, as people do, must not be answered by a host. No other name is
        looked up: it is a stranger's word, of a DNS that may be silent.

        :param named: its invitation is for it alone, or its present certificate names the address.
        """
        if plain_address(address) not in self._own() | self._leaders:
            return ""
        said = f"{address} is a manager's, or once was"
        if not named:
            cure = f"`ebb host invite {host}`, and there the line that it prints, with --force"
            return f"{said}, for which a host has to be invited by its name: {cure}"
        elsewhere = await _elsewhere(remote, address)
        return f"{said}, and {elsewhere}" if elsewhere else ""

    def _own(self) -> frozenset[str]:
        """What stands in the manager's certificates, that of its start and the present one."""
        if self._authority is None:
            return frozenset()
        return self._authority.own.union(*map(names_in, self._certificates()[:1]))

    async def _key_of(self, request: str, host: str) -> object:
        try:
            return await asyncio.to_thread(public_key_of, request, host)
        except AccessError as error:
            raise RequestError(400, f"csr: {error}", "csr") from None

    async def _sign(self, request: str, host: str, address: str, refusal: str, authority: CertificateAuthority) -> str:
        if refusal:
            raise RequestError(400, f"address: {refusal}", "address")
        try:
            alternative(address)
        except AccessError as error:
            raise RequestError(400, f"address: {error}", "address") from None
        if authority.has_ended():
            raise not_configured("the CA has expired: it signs nothing more")
        try:
            return await asyncio.to_thread(authority.answer, request, host, (address,), self._days)
        except AccessError as error:
            raise RequestError(400, f"csr: {error}", "csr") from None

    async def _save(self, known: Enrolled) -> None:
        await self._store.save_knowledge(NAME, known.model_dump_json())
        self._known = known


def _kind_of(url: str) -> tuple[str, bool]:
    """Whether by TLS, and whether from the same machine only: one of before the cluster grew helps no host."""
    parts = urlsplit(url)
    return parts.scheme, is_loopback(parts.hostname or "")


async def _elsewhere(remote: str | None, address: str) -> str:
    """Why a request is not from the address that it names, nor from one that the name has here; empty: it is."""
    if remote is None:
        return "nobody knows from where the request came"
    came, named = plain_address(remote), plain_address(address)
    if came == named:
        return ""
    said = f"the request came from {came}"
    try:
        async with asyncio.timeout(_LOOKED_UP_S):
            found = await asyncio.get_running_loop().getaddrinfo(address, None)
    except (OSError, TimeoutError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error) or "no answer in time"
        return f"{said}; {address} could not be looked up: {why}"
    places = {plain_address(str(where[0])) for *_, where in found}
    if came in places:
        return ""
    return f"{said}; {address} is {', '.join(sorted(places))}" if places - {named} else said


def _digest(token: str) -> str:
    """Of the part before the CA's fingerprint: 256 bits of chance need no slow hash."""
    return hashlib.sha256(token.partition(".")[0].encode()).hexdigest()

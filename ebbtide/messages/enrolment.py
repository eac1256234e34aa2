"""REST bodies of enrolment: invitations, what a host that joins asks for and gets, renewal, revocation."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from ebbtide.messages.common import Body, Name, Sentence

LONGEST_INVITATION_S: Final = 30 * 86_400.0
#: Of a certificate, a request for one and the like; those of the curves in use have a tenth of it.
LONGEST_PEM: Final = 8192

#: The common name of what a CA signs for the one that is to follow it: no host and no manager can be called so.
SUCCESSOR_NAME: Final = "Ebbtide CA that follows"
#: One and nothing behind it: who looks at the first must not trust a second.
_ONE_PEM: Final = r"^-----BEGIN [A-Z ]+-----\n[A-Za-z0-9+/=\n]+-----END [A-Z ]+-----\n?$"

Pem = Annotated[str, Field(max_length=LONGEST_PEM, pattern=_ONE_PEM)]


class InvitationRequest(Body):
    """POST /v1/invitations of the manager."""

    host: Name | None = Field(None, description="the only host that may use it; default: any that is not known yet")
    expires_s: float = Field(
        3600.0,
        ge=10,
        le=LONGEST_INVITATION_S,
        allow_inf_nan=False,
        strict=True,
        description="how long it can be used, seconds",
    )


class Invitation(Body):
    """A token that enrols one host, shown once."""

    token: str = Field(description="with the CA's fingerprint behind a point, where there is TLS")
    url: str = Field(description="where the host reaches this manager")
    host: Name | None = Field(description="the only one that may use it; null: any")
    expires_at: float = Field(description="seconds since the epoch")


class VoidedInvitations(Body):
    """Answer to DELETE /v1/invitations of the manager."""

    count: int = Field(description="of invitations that had not expired and were not used")
    sentence: str = Field(description="the same in words")


class Authority(Body):
    """GET /v1/ca of the manager: whoever asks compares it with the fingerprint in the invitation."""

    ca: Pem = Field(description="its certificate")


class Successor(Body):
    """GET /v1/ca/next of the manager: the CA that is to follow, and the present one's word for it."""

    ca: Pem = Field(description="its certificate")
    proof: Pem = Field(description="a certificate of its key by the name 'Ebbtide CA that follows', of the present CA")


class Rollover(Body):
    """GET /v1/ca/rollover of the manager: which hosts have no certificate yet of the CA that is to follow."""

    ca: str | None = Field(description="SHA-256 of the CA that signs; null: this manager signs no certificates")
    next: str | None = Field(description="SHA-256 of the one that is to follow; null: none is")
    hosts: tuple[Name, ...] = Field(
        description="that have shown no certificate of that one since this manager leads, by name"
    )
    sentence: str = Field(description="how far it is")


class EnrolmentRequest(Body):
    """POST /v1/enrolments of the manager, which needs no other token than the one in it."""

    token: Annotated[str, Field(min_length=20, max_length=200)] = Field(
        description="of the invitation, without the fingerprint"
    )
    host: Name = Field(description="the host's id from now on")
    address: Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z.:-]{0,252}$")] = Field(
        description="IP address or name at which its agent listens"
    )
    csr: Pem | None = Field(None, description="PKCS #10: common name HOST; needed where there is TLS")


class Enrolment(Body):
    """What a host has from then on: tokens of both directions, which are good for no other host, and a certificate."""

    host: Name = Field(description="the host's id")
    command_token: str = Field(description="what the manager sends to the host's agent")
    report_token: str = Field(description="what the host's agent sends to the manager")
    managers: tuple[str, ...] = Field(description="where it reports")
    certificate: Pem | None = Field(None, description="the host's own; null: there is no TLS")
    ca: Pem | None = Field(None, description="who signs the certificates of this cluster; null: there is no TLS")


class RenewalRequest(Body):
    """POST /v1/hosts/ID/certificate of the manager, by the host agent itself."""

    csr: Pem = Field(description="PKCS #10: common name HOST")
    address: Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z.:-]{0,252}$")] = Field(
        description="IP address or name at which its agent listens"
    )
    ca: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None, description="SHA-256 of the CA that is to sign, which the host trusts; default: the present one"
    )


class Renewal(Body):
    """The host's next certificate."""

    certificate: Pem = Field(description="the next one")


class RevocationRequest(Body):
    """POST /v1/hosts/ID/revocation of the manager."""

    reason: Annotated[Sentence, Field(min_length=1, max_length=200)] = Field(description="for the log")


class Revocation(Body):
    """Answer to that."""

    host: Name = Field(description="the host's id")
    sentence: str = Field(description="what follows from it")

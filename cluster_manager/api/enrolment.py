"""Routes of enrolment: invitations, joining, certificates, revocation."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from cluster_manager.api.forms import MANAGER, answer, body_of
from cluster_manager.authority import plain_address
from ebbtide.messages.common import Name
from ebbtide.messages.enrolment import (
    Authority,
    Enrolment,
    EnrolmentRequest,
    Invitation,
    InvitationRequest,
    Renewal,
    RenewalRequest,
    Revocation,
    RevocationRequest,
    Rollover,
    Successor,
    VoidedInvitations,
)
from ebbtide.rest.descriptions import Parameter, describe
from ebbtide.rest.parameters import check_parameters

_ID: Final = Parameter("id", Name, "the host's id")

routes = web.RouteTableDef()


@routes.post("/v1/invitations")
@describe("Invite a host", tag="hosts", body=InvitationRequest, answers={200: Invitation}, problems=(409,))
async def invite(request: web.Request) -> web.Response:
    check_parameters(request)
    wanted = await body_of(request, InvitationRequest)
    return answer(await request.app[MANAGER].enrolments.invite(wanted))


@routes.delete("/v1/invitations")
@describe("Take back the invitations that nobody has used", tag="hosts", answers={200: VoidedInvitations})
async def void(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(await request.app[MANAGER].enrolments.void())


@routes.get("/v1/ca")
@describe("The CA of this cluster", tag="hosts", answers={200: Authority}, problems=(409,), security="none")
async def authority(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(Authority(ca=request.app[MANAGER].enrolments.authority.pem))


@routes.get("/v1/ca/next")
@describe("The CA that is to follow", tag="hosts", answers={200: Successor}, problems=(409,), security="none")
async def successor(request: web.Request) -> web.Response:
    check_parameters(request)
    return answer(request.app[MANAGER].enrolments.successor())


@routes.get("/v1/ca/rollover")
@describe("Which hosts have no certificate yet of the CA that is to follow", tag="hosts", answers={200: Rollover})
async def rollover(request: web.Request) -> web.Response:
    check_parameters(request)
    manager = request.app[MANAGER]
    return answer(manager.enrolments.rollover(manager.hosts.ids()))


@routes.post("/v1/enrolments")
@describe(
    "Join, with an invitation",
    tag="hosts",
    body=EnrolmentRequest,
    answers={200: Enrolment},
    problems=(403, 409),
    security="none",
)
async def enrol(request: web.Request) -> web.Response:
    check_parameters(request)
    wanted = await body_of(request, EnrolmentRequest)
    return answer(await request.app[MANAGER].enrolments.enrol(wanted, _from_here(request), request.remote))


@routes.post("/v1/hosts/{id}/certificate")
@describe(
    "A host's next certificate",
    tag="hosts",
    path=(_ID,),
    body=RenewalRequest,
    answers={200: Renewal},
    problems=(409,),
    security="agent",
)
async def renew(request: web.Request) -> web.Response:
    check_parameters(request)
    wanted = await body_of(request, RenewalRequest)
    host, enrolments = request.match_info["id"], request.app[MANAGER].enrolments
    named = _has_it_already(request, wanted.address)
    return answer(await enrolments.renew(host, wanted, _from_here(request), request.remote, named))


@routes.post("/v1/hosts/{id}/revocation")
@describe(
    "Revoke a host for good",
    tag="hosts",
    path=(_ID,),
    body=RevocationRequest,
    answers={200: Revocation},
    problems=(404,),
)
async def revoke(request: web.Request) -> web.Response:
    check_parameters(request)
    wanted = await body_of(request, RevocationRequest)
    return answer(await request.app[MANAGER].enrolments.revoke(request.match_info["id"], wanted.reason))


def _has_it_already(request: web.Request, address: str) -> bool:
    """Whether a host asks for an address that its present certificate names.

    Guests behind another manager's machine come from that manager's address, too: an invitation by name gave it first.
    """
    shown = request.get_extra_info("peercert") or {}
    names = {plain_address(name) for _, name in shown.get("subjectAltName", ())}
    return plain_address(address) in names


def _from_here(request: web.Request) -> bool:
    """Whether a request came from the machine that it came to."""
    ours = request.get_extra_info("sockname")
    return ours is not None and request.remote == ours[0]

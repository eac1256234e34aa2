"""What of a request only an admin may ask for."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from deflation.messages import VMRequest
from deflation.roles import Role
from rest.access import require

#: Fields of POST /v1/vms: domain XML reaches further than a template does.
ADMIN_FIELDS: Final = ("vm.xml",)


def needs_admin(body: VMRequest) -> str | None:
    """The field that only an admin may give; None: anybody who may create VMs may send this."""
    return "vm.xml" if body.vm.xml is not None else None


def check_admin(request: web.Request, body: VMRequest) -> None:
    """Hold a request against the role of whoever sent it.

    :raises Refused: 403 with the field.
    """
    if (field := needs_admin(body)) is not None:
        require(request, Role.ADMIN, field)

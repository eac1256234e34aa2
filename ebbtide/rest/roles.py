"""Roles of callers on the REST interfaces, and the role that a route needs.

Two kinds of callers never meet: people and programs (metrics, viewer, operator, admin, manager, each may do what the
one before may), and host agents, which report and do nothing else. A caller of the one kind is a stranger on the routes
of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Role(StrEnum):
    """What a token is good for."""

    #: Reads the metrics, and where they are: nothing else.
    METRICS = "metrics"
    #: Looks at everything, changes nothing.
    VIEWER = "viewer"
    #: Changes what can be changed, too.
    OPERATOR = "operator"
    #: And what would make its sender root on a host: domain XML in a request.
    ADMIN = "admin"
    #: The cluster's manager, towards a host agent: an admin whose epoch and order count. Never in a tokens file.
    MANAGER = "manager"
    #: A host agent: reports of its own host.
    AGENT = "agent"


#: Routes whose role does not follow from their method, by method and canonical path.
ROUTE_ROLES: Final[Mapping[tuple[str, str], Role]] = {
    ("POST", "/v1/hosts/{id}/report"): Role.AGENT,
    ("POST", "/v1/hosts/{id}/usage"): Role.AGENT,
    ("POST", "/v1/hosts/{id}/certificate"): Role.AGENT,
    # Who belongs to the cluster.
    ("POST", "/v1/invitations"): Role.ADMIN,
    ("DELETE", "/v1/invitations"): Role.ADMIN,
    ("POST", "/v1/hosts/{id}/revocation"): Role.ADMIN,
    # All that the manager knows, in one file.
    ("GET", "/v1/backup"): Role.ADMIN,
    # It has a guest's driver asked for some seconds.
    ("GET", "/v1/adoptions"): Role.OPERATOR,
    # What a task prints may hold secrets: for those who may submit one. Tenants: `cluster_manager.tasks.output`.
    ("GET", "/v1/tasks/{name}/output"): Role.OPERATOR,
    ("PUT", "/v1/epoch"): Role.MANAGER,
    # A Prometheus' own, which stands in a file beside it.
    ("GET", "/metrics"): Role.METRICS,
    ("GET", "/v1/hosts/{id}/metrics"): Role.METRICS,
    ("GET", "/v1/prometheus/targets"): Role.METRICS,
    # Where a VM's memory is sent, and what may come here with another one's identity.
    ("POST", "/v1/vms/{name}/arrival"): Role.MANAGER,
    ("POST", "/v1/vms/{name}/departure"): Role.MANAGER,
}
#: Routes that need no token: an enrolment has one in its body.
OPEN_ROUTES: Final = frozenset({"/", "/page/{file}", "/healthz", "/readyz", "/v1/ca", "/v1/ca/next", "/v1/enrolments"})

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_RANK: Final = {Role.METRICS: 0, Role.VIEWER: 1, Role.OPERATOR: 2, Role.ADMIN: 3, Role.MANAGER: 4}


def needed(method: str, route: str) -> Role:
    """The least role that may use a route.

    :param route: its canonical path, such as ``/v1/vms/{name}``.
    """
    # HEAD asks for a GET without its body.
    special = ROUTE_ROLES.get(("GET" if method == "HEAD" else method, route))
    if special is not None:
        return special
    return Role.VIEWER if method in _READING else Role.OPERATOR


def same_kind(role: Role, other: Role) -> bool:
    """Whether both are of people and programs, or both of host agents."""
    return (role is Role.AGENT) == (other is Role.AGENT)


def covers(role: Role, other: Role) -> bool:
    """Whether a role may do all that the other one may."""
    if not same_kind(role, other):
        return False
    return role is Role.AGENT or _RANK[role] >= _RANK[other]


def allowed(role: Role, method: str, route: str) -> bool:
    """Whether a role may use a route. Raises nothing; an unknown method or route is like any other."""
    return covers(role, needed(method, route))

"""Roles: who covers whom, and what a route needs."""

from __future__ import annotations

import pytest

from ebbtide.rest.roles import Role, allowed, covers, needed

REPORT = "/v1/hosts/{id}/report"


@pytest.mark.parametrize(
    ("role", "may"),
    [
        (Role.METRICS, {Role.METRICS}),
        (Role.VIEWER, {Role.METRICS, Role.VIEWER}),
        (Role.OPERATOR, {Role.METRICS, Role.VIEWER, Role.OPERATOR}),
        (Role.ADMIN, {Role.METRICS, Role.VIEWER, Role.OPERATOR, Role.ADMIN}),
        (Role.MANAGER, set(Role) - {Role.AGENT}),
        (Role.AGENT, {Role.AGENT}),
    ],
)
def test_a_role_covers_those_below_it_of_its_own_kind(role: Role, may: set[Role]) -> None:
    assert {other for other in Role if covers(role, other)} == may


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_reading_needs_a_viewer(method: str) -> None:
    assert needed(method, "/v1/vms") is Role.VIEWER


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "CONNECT", "get"])
def test_all_else_needs_an_operator(method: str) -> None:
    assert needed(method, "/v1/vms") is Role.OPERATOR


def test_reports_are_the_agents_and_nothing_else_is() -> None:
    assert {role for role in Role if allowed(role, "POST", REPORT)} == {Role.AGENT}
    assert not allowed(Role.AGENT, "GET", REPORT)
    assert not allowed(Role.AGENT, "GET", "/v1/hosts")

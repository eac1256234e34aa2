"""Tokens, certificates and templates of a host agent: the files that its options name. All of this blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ebbtide.rest.access import Certificates
from ebbtide.rest.errors import AccessError
from ebbtide.rest.gate import Gate
from ebbtide.rest.roles import Role
from ebbtide.rest.settings import AccessSettings
from ebbtide.rest.tokens import Principal, principal, read_token
from hostagent.domain_xml.template_library import TemplateLibrary
from hostagent.domain_xml.templates import PACKAGED
from hostagent.options import HostAgentOptions, own_capacity


def manager_token(token_file: Path, manager: str | Sequence[str] | None, manager_token_file: Path | None) -> str:
    """The token for reports; empty where there is no manager.

    :raises AccessError: a token that cannot be used, or both are the same.
    """
    token, found = read_token(token_file), ""
    if manager:
        if manager_token_file is None:
            raise AccessError("a manager needs a token of its own")
        found = read_token(manager_token_file)
    if found == token:
        raise AccessError("--token-file and --manager-token-file hold the same token: there is one for each direction")
    return found


def gate_of(access: AccessSettings, token_file: Path, manager_name: str) -> Gate:
    """Who may come in, and how.

    :param manager_name: with mutual TLS, the common name of all callers.
    :raises AccessError: tokens or certificates that cannot be used.
    """

    def own() -> list[Principal]:
        return [principal("token-file", Role.MANAGER, read_token(token_file))]

    return Gate(access, own, Certificates(name=manager_name), True)


def check_files(options: HostAgentOptions, access: AccessSettings) -> None:
    """Read what an agent with these options reads at its start.

    :raises AccessError: tokens or certificates that cannot be used.
    :raises HostAgentError: a template that cannot be used, or a reserve that leaves nothing.
    """
    manager_token(options.token_file, options.manager, options.manager_token_file)
    gate_of(access, options.token_file, options.manager_name)
    if options.capacity == "auto":
        own_capacity(options.reserve_mib)
    TemplateLibrary.load((*options.templates, PACKAGED), 0)

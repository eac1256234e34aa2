"""Commands for access: tokens with roles, certificates for a lab, and the options of TLS (docs/security.md)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from deflation.messages import Name
from deflation.roles import Role
from ebb.certificates import Authority, Purpose, make_certificates
from ebb.commands.options import Json
from ebb.errors import EbbError
from ebb.lab.state import new_token
from ebb.output import print_json
from ebb.tls import TLS_FILES, TLSFiles

Ca = Annotated[
    Path | None,
    typer.Option("--ca", envvar="EBB_CA", metavar="FILE", help="CA of an https manager; default: the system's."),
]
Certificate = Annotated[
    Path | None,
    typer.Option("--certificate", envvar="EBB_CERTIFICATE", metavar="FILE", help="Our certificate, if it asks."),
]
Key = Annotated[Path | None, typer.Option("--key", envvar="EBB_KEY", metavar="FILE", help="The key of --certificate.")]


def connection(ca: Ca = None, certificate: Certificate = None, key: Key = None) -> None:
    """Deflate virtual machines instead of killing them."""
    TLS_FILES.set(TLSFiles(ca, certificate, key))


def token_new(
    role: Annotated[Role, typer.Option(help="What the token is good for.")],
    name: Annotated[str, typer.Option(help="Whose it is, for logs.")],
    host: Annotated[str | None, typer.Option(help="Role agent: the only host it may report of.")] = None,
    json: Json = False,
) -> None:
    """Make a token; it is shown once, and its hash goes into the tokens file of a daemon."""
    for value in (name, host):
        try:
            TypeAdapter(Name).validate_python(value if value is not None else "unset")
        except ValidationError:
            raise EbbError(f"{value!r} is no name: lower-case letters, digits and hyphens, 1 to 40") from None
    if host is not None and role is not Role.AGENT:
        raise EbbError("--host is for the role agent only")
    token = new_token()
    entry = {"name": name, "role": role.value, "sha256": hashlib.sha256(token.encode()).hexdigest()}
    if host is not None:
        entry["host"] = host
    if json:
        print_json({"token": token, "entry": entry})
        return
    print(f"# the token, shown once: {token}")
    print("# for the tokens file:")
    print("[[token]]")
    for field, value in entry.items():
        print(f'{field} = "{value}"')


def certificates(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where they go; made if it is not there.")],
    manager: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Name or IP address of the manager; repeat it. [127.0.0.1, localhost]"),
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="ID[=ADDRESS]", help="A host and where its agent listens; repeat it.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long they are valid.")] = 365,
    json: Json = False,
) -> None:
    """Make a CA (or use the one that is there) and certificates of a manager and of hosts, for mutual TLS."""
    wanted = [Purpose.manager(manager or ["127.0.0.1", "localhost"]), *(Purpose.host(text) for text in host or [])]
    made = make_certificates(Authority.in_directory(directory, days), wanted, days)
    if json:
        print_json({"ca": str(directory / "ca.pem"), "certificates": [str(path) for path in made]})
        return
    print(f"CA: {directory / 'ca.pem'} (keep ca.key off all hosts)")
    for path in made:
        print(f"{path} with {path.with_suffix('.key').name}")

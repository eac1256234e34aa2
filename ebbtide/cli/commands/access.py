"""Commands for access: tokens with roles, certificates for a lab, and the options of TLS.

See docs/reference/security.md.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from ebbtide.cli.certificates import (
    CA_DAYS,
    DAYS,
    MANAGER,
    Authority,
    Purpose,
    begin_rollover,
    finish_rollover,
    has_begun,
    make_certificates,
    still_counts,
)
from ebbtide.cli.commands.options import Asking, Printing
from ebbtide.cli.output import shown
from ebbtide.errors import EbbError
from ebbtide.lab.state import new_token, write_private
from ebbtide.messages.common import Name
from ebbtide.rest.credentials import command_token, report_token
from ebbtide.rest.errors import AccessError
from ebbtide.rest.roles import Role
from ebbtide.rest.tokens import read_token
from hostagent.errors import HostAgentError
from hostagent.state.files import alone_in
from hostagent.state.journal import Journal

DEFAULT_KEY = Path("/etc/ebbtide/hosts.key")
DEFAULT_STATE = Path("/var/lib/ebbtide/agent")
Directory = Annotated[
    Path, typer.Argument(metavar="DIRECTORY", help="That of `ebb certificates`, with ca.pem and ca.key.")
]


def token_new(
    role: Annotated[Role, typer.Option(help="What the token is good for.")],
    name: Annotated[str, typer.Option(help="Whose it is, for logs.")],
    host: Annotated[str | None, typer.Option(help="Role agent: the only host it may report of.")] = None,
    *,
    to: Printing,
) -> None:
    """Make a token; it is shown once, and its hash goes into the tokens file of a daemon."""
    for value in (name, host):
        try:
            TypeAdapter(Name).validate_python(value if value is not None else "unset")
        except ValidationError:
            raise EbbError(f"{value!r} is no name: lower-case letters, digits and hyphens, 1 to 40") from None
    if (host is not None) != (role is Role.AGENT):
        raise EbbError("--host is for the role agent only, which needs one")
    if role is Role.MANAGER:
        raise EbbError("the role manager is the one of a host agent's --token-file")
    token = new_token()
    entry = {"name": name, "role": role.value, "sha256": hashlib.sha256(token.encode()).hexdigest()}
    if host is not None:
        entry["host"] = host
    lines = [f"# the token, shown once: {token}", "# for the tokens file:", "[[token]]"]
    lines += [f'{field} = "{value}"' for field, value in entry.items()]
    to.say({"token": token, "entry": entry}, lambda: print("\n".join(lines)))


def host_tokens(
    name: Annotated[str, typer.Argument(metavar="HOST", help="The host's id, as in ebb-hostagent --id.")],
    key_file: Annotated[Path, typer.Option(metavar="FILE", help="The manager's; made if missing.")] = DEFAULT_KEY,
    directory: Annotated[Path, typer.Option(metavar="DIRECTORY", help="Where the two files go.")] = Path(),
    *,
    to: Printing,
) -> None:
    """Write the two tokens of a host, one for each direction, made of the manager's key, good for no other host.

    HOST.command-token is its --token-file, HOST.report-token its --manager-token-file. A manager registers no host
    without them. Run it where the manager's key is.
    """
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError:
        raise EbbError(f"{name!r} is no name: lower-case letters, digits and hyphens, 1 to 40") from None
    try:
        if not key_file.exists():
            write_private(key_file, new_token() + "\n")
        key = read_token(key_file)
        made = {"command": directory / f"{name}.command-token", "report": directory / f"{name}.report-token"}
        write_private(made["command"], command_token(key, name) + "\n")
        write_private(made["report"], report_token(key, name) + "\n")
    except OSError as error:
        raise EbbError(f"{error.filename or key_file} cannot be written: {error.strerror}") from error
    except AccessError as error:
        raise EbbError(str(error)) from error
    sentence = f"for {name}: {made['command']} (--token-file), {made['report']} (--manager-token-file)"
    to.say({"host": name, **{direction: str(path) for direction, path in made.items()}}, lambda: print(sentence))


def epoch(
    state_dir: Annotated[Path, typer.Option(metavar="DIRECTORY", help="As in ebb-hostagent.")] = DEFAULT_STATE,
    reset: Annotated[bool, typer.Option("--reset", help="Follow the next manager that commands, whichever.")] = False,
    *,
    to: Printing,
) -> None:
    """Show which leadership of the manager a host agent follows, or forget it; run it on the host.

    An agent refuses a manager of a lower epoch. After the manager's store was lost or restored from a backup that is
    the one you have: stop the agent, reset, start it. Before that, make sure that no older manager runs.
    """
    try:
        if not (state_dir / "state.json").is_file():
            raise EbbError(f"{state_dir} is no state directory of a host agent: it has no state.json")
        # An agent that runs writes its own file over whatever is written here: nothing is told to be done that is not.
        before = after = int(json.loads((state_dir / "state.json").read_text())["epoch"])
        if reset:
            with alone_in(state_dir):
                journal = Journal(state_dir)
                before = journal.epoch
                journal.forget_epoch()
                after = journal.epoch
    except (OSError, ValueError, KeyError, TypeError, HostAgentError) as error:
        raise EbbError(f"{state_dir} cannot be used: {error}") from error
    sentence = (
        f"epoch {before} is forgotten: the agent follows the next manager that commands it"
        if reset
        else f"the agent follows the manager with epoch {before}, and later ones"
    )
    to.say({"epoch": after, "before": before}, lambda: print(sentence))


def certificates(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where they go; made if it is not there.")],
    manager: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Name or IP address of the manager; repeat it. [127.0.0.1, localhost, where it has no certificate]",
        ),
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="ID[=ADDRESS]", help="A host and where its agent listens; repeat it.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=CA_DAYS, help="How long they are valid; a CA: ten years.")] = DAYS,
    *,
    to: Printing,
) -> None:
    """Make a CA (or use the one that is there) and certificates of a manager and of hosts, for mutual TLS."""
    wanted = [Purpose.host(text) for text in host or []]
    following = Authority.following(directory, days)
    # One that is there is in use, with addresses that are not said again where a host is added.
    of_manager = bool(manager) or not (directory / f"{MANAGER}.pem").exists()
    # Managers believe hosts by both CAs, hosts a manager by the one before: that one counts only if it is to sign.
    authority = following if following and not of_manager else Authority.in_directory(directory, days)
    made = []
    if of_manager:
        made = make_certificates(authority, [Purpose.manager(manager or ["127.0.0.1", "localhost"])], days)
    made += make_certificates(following or authority, wanted, days)
    lines = [f"CA: {directory / 'ca.pem'} (keep ca.key off all hosts)"]
    lines += [f"{path} with {path.with_suffix('.key').name}" for path in made]
    to.say(
        {"ca": str(directory / "ca.pem"), "certificates": [str(path) for path in made]},
        lambda: print("\n".join(lines)),
    )


def ca_next(directory: Directory, *, to: Printing) -> None:
    """Make a CA that is to follow the one that is there; hosts take it over by themselves, and nothing ends by that."""
    begin_rollover(directory)
    key = directory / "next-ca.key"
    lines = (
        f"{directory / 'ca.pem'} has both CAs: give it to all managers and to people",
        f'next_ca_key = "{key.absolute()}" goes into the options of all managers; then restart them, standbys first',
        "`ebb ca show` tells which hosts have a certificate of it, which takes them some hours at the most",
    )
    to.say({"ca": str(directory / "ca.pem"), "next_ca_key": str(key)}, lambda: print("\n".join(lines)))


def ca_show(*, to: Asking) -> None:
    """Show which hosts have no certificate yet of the CA that is to follow."""
    found = to.ask(lambda client: client.ca_rollover())
    to.say(found, lambda: print(shown(found.sentence)))


def ca_finish(
    directory: Directory,
    days: Annotated[int, typer.Option(min=1, max=CA_DAYS, help="Of the manager's certificate.")] = DAYS,
    *,
    to: Asking,
) -> None:
    """Drop the CA of before, with a new certificate for the manager, once every host has one of the CA that follows.

    Refused while a host that is neither revoked nor forgotten has not; it is named. Run it where the CAs' keys are.
    Where the CA of before has ended, it counts nowhere any more, and no manager is asked; nor is one where this command
    was broken off, since the manager may not start until it has ended.
    """
    following = Authority.following(directory, days)
    if following is None:
        raise EbbError(f"there is no CA that is to follow in {directory}: `ebb ca next` makes one")
    begun, counts = has_begun(directory), still_counts(directory, following)
    if counts and not begun:
        _check_followed(directory, following, to)
    made = finish_rollover(directory, following, days)
    ended = "the CA of before had ended, so that no manager was asked: hosts that stay silent are to be invited again"
    lines = (
        *(() if counts or begun else (ended,)),
        f"{directory / 'ca.pem'} has the CA that followed alone, and {directory / 'ca.key'} is its key",
        f"{', '.join(map(str, made))} and its key are the manager's by it",
        "give these files to all managers, take next_ca_key out of their options, and restart them; people get ca.pem",
        f"when all is well, remove {directory / 'old-ca.key'}",
    )
    to.say({"ca": str(directory / "ca.pem"), "certificates": list(map(str, made))}, lambda: print("\n".join(lines)))


def _check_followed(directory: Path, following: Authority, to: Asking) -> None:
    """:raises EbbError: as the manager says, the CA of before cannot be dropped yet."""
    found = to.ask(lambda client: client.ca_rollover())
    if found.next != following.fingerprint:
        wanted = "no CA" if found.next is None else "another CA"
        raise EbbError(
            f"to the manager {wanted} is to follow, not {directory / 'next-ca.pem'}: start it with --next-ca-key"
        )
    if found.hosts:
        raise EbbError(
            f"these hosts have shown no certificate of the CA that is to follow: {', '.join(map(shown, found.hosts))}; "
            "nothing was dropped"
        )

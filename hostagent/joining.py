"""``ebb-hostagent join``: key and certificate, tokens and options of a host that was invited to a cluster.

The key never leaves the host. The CA is believed by its fingerprint, which came with the invitation; from then on the
manager is known by its certificate.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import hashlib
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import aiohttp
from pydantic import BaseModel, TypeAdapter, ValidationError

from ebbtide.extras import installing
from ebbtide.messages.common import Address, Name, problem_in
from ebbtide.messages.enrolment import Authority, Enrolment, EnrolmentRequest
from ebbtide.messages.hosts import capacity_of
from ebbtide.rest.errors import AccessError
from ebbtide.rest.tls import client_context, is_base, is_everywhere, is_loopback
from hostagent.control.asking import B, Refused, ask
from hostagent.control.renewal import request_of
from hostagent.control.succession import before_of
from hostagent.errors import WAITS, HostAgentError
from hostagent.options import (
    MANAGER_NAME,
    UNNAMED,
    HostAgentOptions,
    address_of,
    notes_on,
    unwritable_above,
)
from hostagent.state.files import alone_in, make_parents, replace, sync_names
from hostagent.state.journal import Journal

#: Beside the agent's own state, since the service may write there: certificates are renewed.
DIRECTORY: Final = Path("/var/lib/ebbtide/enrolment")
PORT: Final = 7101
LONGEST_TOKEN: Final = 500
#: Options that belong to the cluster that a host leaves with --force.
_OF_CLUSTER: Final = frozenset(
    {"url", "manager_ca", "certificate", "key", "manager_name", "tls_certificate", "tls_key", "client_ca"}
)
#: There where systemd runs.
SYSTEMD: Final = Path("/run/systemd/system")
ABOUT: Final = "Join a cluster, with an invitation of `ebb host invite`."
EXAMPLES: Final = """\
examples:
  ebb-hostagent join https://10.0.0.1:7100 - <<<TOKEN
  ebb-hostagent join https://10.0.0.1:7100 --id host-b --listen 10.0.0.12:7101 \\
      --capacity cpu_cores=14,memory_mib=57344
"""


def join(words: Sequence[str]) -> None:
    """Join as the words of a command line say, and tell what was done.

    :raises HostAgentError: it did not join; nothing but its key is left.
    """
    given = _parser().parse_args(words)
    if given.token == "-":
        given.token = _token_given()
    asyncio.run(_join(given))


def _token_given() -> str:
    """From standard input; a terminal is asked, and shows nothing."""
    token = ""
    with suppress(EOFError):
        if sys.stdin is not None:  # it is closed
            token = getpass.getpass("token: ") if sys.stdin.isatty() else sys.stdin.readline(LONGEST_TOKEN)
    if not token.strip():
        raise HostAgentError("there is no token: give it on standard input, as the line of `ebb host invite` does")
    return token.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ebb-hostagent join", description=ABOUT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the manager")
    parser.add_argument(
        "token",
        nargs="?",
        default="-",
        help="as `ebb host invite` prints it, works once; -: from standard input, since a command line is shown to "
        "every user of this machine [%(default)s]",
    )
    parser.add_argument(
        "--id", help=f"this host's name in the cluster [what the file of options has, else {_own_name()}]"
    )
    parser.add_argument(
        "--listen",
        help="where to serve, and to be called in the place of any `url` of before [what the file of options has, else "
        f"the address that reaches the manager, port {PORT}]",
    )
    parser.add_argument("--capacity", help="as of ebb-hostagent [what the file of options has, else auto]")
    parser.add_argument("--config", type=Path, default=HostAgentOptions.file, help="the options go here [%(default)s]")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="key, certificate, tokens [%(default)s]")
    parser.add_argument("--force", action="store_true", help="replace key, certificate and address that are there")
    parser.add_argument("--no-start", action="store_true", help="do not start the service")
    return parser


async def _join(given: argparse.Namespace) -> None:
    host, manager, listen = _checked(given)
    url, directory = urlsplit(manager), given.directory
    secure = url.scheme == "https"
    token, _, fingerprint = given.token.partition(".")
    if secure and len(fingerprint) != 64:
        raise HostAgentError("the token is not whole: behind a point it has the fingerprint of the cluster's CA")
    if not secure and not is_loopback(url.hostname or ""):
        raise HostAgentError(f"{manager} would get the token over plain HTTP: give https://")
    reached, at = _place(given, listen, url)
    if secure:
        _need_cryptography()
    try:
        # What cannot be written is found before the invitation is used.
        make_parents(given.config)
        tempfile.TemporaryFile(dir=given.config.parent).close()
        make_parents(directory)
        directory.mkdir(mode=0o700, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
        tls: ssl.SSLContext | None = None
        csr: str | None = None
        key = directory / "host.key"
        if secure:
            tls = await _trusted(manager, fingerprint)
            # The key that another one may have, too: of what this machine was, or of what its image was made of.
            key = directory / ("host.key.next" if (directory / "host.pem").exists() else "host.key")
            csr = request_of(_key_in(key), host)
        asked = EnrolmentRequest(token=token, host=host, address=reached.strip("[]"), csr=csr)
        answer = await _ask(tls, f"{manager}/v1/enrolments", Enrolment, asked)
        old = _options(given.config)
        leaves = _leaves(old, answer)
        # The options first: where that fails nothing is left that would count as a host which has joined.
        _private(given.config, _options_text(directory, answer, given, at, manager))
        _write(directory, answer)
        if key.name == "host.key.next":
            # Behind its certificate: a join that was broken off before is repeated with the same one.
            key.replace(directory / "host.key")
            sync_names(directory)
    except OSError as error:
        raise HostAgentError(f"{error.filename or directory} cannot be written: {error.strerror}") from error
    except ValidationError as error:
        raise HostAgentError(f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}") from error
    except AccessError as error:
        raise HostAgentError(str(error)) from error
    print(f"{host} has joined {manager}")
    print(f"options in {given.config}, key and tokens in {directory}")
    state_dir = _directory(old, "state_dir")
    for note in notes_on(state_dir, _directory(old, "disk_dir")) if _is_for_service(given) else ():
        print(f"note: {note}")
    _settle_epoch(given, state_dir, leaves)
    _start(given)


def _checked(given: argparse.Namespace) -> tuple[str, str, tuple[str, int] | None]:
    """Host, manager and address. Raises HostAgentError for what cannot be, or would be lost."""
    # A file that cannot be read is no reason to ask the manager first.
    old = _options(given.config)
    was = old.get("id", UNNAMED)
    name = given.id or (was if was != UNNAMED else _own_name())
    try:
        host = TypeAdapter(Name).validate_python(name)
    except ValidationError:
        raise HostAgentError(f"--id {name} is no name: lower-case letters, digits and hyphens, 1 to 40") from None
    manager = _manager_of(given)
    if not is_base(manager):
        raise HostAgentError(f"{given.url} is no address of a manager: it must be like https://10.0.0.1:7100")
    try:
        capacity = given.capacity if given.capacity is not None else str(old.get("capacity", "auto"))
        if capacity != "auto":
            capacity_of(capacity)
    except ValueError as error:
        source = "--capacity" if given.capacity is not None else f"capacity in {given.config}"
        raise HostAgentError(f"{source}: {error}") from None
    listen = _set_address(given.listen, f"--listen {given.listen}") if given.listen is not None else None
    # Without TLS there is no certificate to renew.
    if urlsplit(manager).scheme == "https" and _is_for_service(given):
        _check_directory(given.directory)
    # Without token or certificate it joined half way.
    files = (Path(old[name]) for name in ("token_file", "tls_certificate") if name in old)
    named = was != UNNAMED and all(file.exists() for file in files)
    if not given.force and (named or (given.directory / "host.pem").exists()):
        what = given.config if named else given.directory / "host.pem"
        raise HostAgentError(f"{what} is there: this host has joined a cluster; --force replaces it")
    state_dir = _directory(old, "state_dir")
    # Who may not look there will have no agent that has its state there.
    has_state = os.path.exists(state_dir / "state.json")
    if has_state and was == UNNAMED and given.id is None:
        raise HostAgentError(
            f"{state_dir} has the state of an agent, and {given.config} does not say what this host was called, as its "
            "VMs are: give that name by --id; or move the directory away"
        )
    if has_state and was not in (UNNAMED, host):
        raise HostAgentError(
            f"the VMs of this host are {was}'s, and {host} would leave them as they are: join as {was} (--id); "
            f"or stop the agent, `ebb-hostagent release`, and move {state_dir} away"
        )
    return host, manager, listen


def _check_directory(directory: Path) -> None:
    """Raises HostAgentError where the service could not renew a certificate."""
    if (root := unwritable_above(directory)) is not None:
        raise HostAgentError(
            f"--directory {directory}: the service ebb-hostagent can write nothing below {root}, so the certificate "
            f"would never be renewed; give another one, like {DIRECTORY}, or --no-start where something else runs the "
            "agent"
        )


def _place(
    given: argparse.Namespace, listen: tuple[str, int] | None, manager: SplitResult
) -> tuple[str, dict[str, str]]:
    """The address that the certificate names, and the options on where the agent serves.

    What the operator has set stays, but for what ``--listen`` says, and ``--force`` where it fits no more.

    :raises HostAgentError: the manager could not call there, or others could without TLS.
    """
    old = _options(given.config)
    set_url = old.get("url") if listen is None and not given.force else None
    source = f"--listen {given.listen}"
    # Asked for only where it is needed: a host that is told all about itself joins without a route, too.
    own = ""
    if listen is None and "listen" in old:
        source = f'listen = "{old["listen"]}" in {given.config}'
        listen = _set_address(old["listen"], source)
        own = _own_address(manager.hostname or "", manager.port or 443)
        unreached = is_loopback(listen[0]) and not is_loopback(own)
        if given.force:
            known = _manager_of(given) in _managers_in(old)
            if not is_everywhere(listen[0]) and (unreached or not known or not _is_own(listen[0])):
                listen = "", listen[1]
        elif unreached and set_url is None:
            raise HostAgentError(f"{source} is no address that the manager could call: change it, or give --listen")
    address, port = listen if listen is not None else ("", PORT)
    if manager.scheme != "https" and address and not is_loopback(address):
        raise HostAgentError(
            f"{source} can be reached from other machines, and over plain HTTP a host gets no certificate: give an "
            "address of loopback"
        )
    everywhere = not address or is_everywhere(address)
    if set_url is None and not everywhere:
        _check_address(f"{manager.scheme}://{address}:{port}", source)
    reached = (own or _own_address(manager.hostname or "", manager.port or 443)) if everywhere else address
    at = {"listen": f"{address or reached}:{port}"}
    if set_url is not None:
        return _host_in(set_url, manager.scheme, given.config), at
    # Of all addresses, the one that the certificate names is where the manager calls.
    if address and everywhere:
        at["url"] = f"{manager.scheme}://{reached}:{port}"
    return reached, at


def _set_address(text: Any, source: str) -> tuple[str, int]:
    try:
        return address_of(str(text))
    except ValueError as error:
        raise HostAgentError(f"{source}: {error}") from None


def _check_address(url: str, source: str) -> None:
    """Raises HostAgentError for what the agent itself would refuse to start with."""
    try:
        TypeAdapter(Address).validate_python(url)
    except ValidationError:
        raise HostAgentError(f"{source} must be like 10.0.0.12:7101 or [fd00::12]:7101") from None


def _host_in(url: Any, scheme: str, config: Path) -> str:
    """The host in the option ``url``: the manager will call it, and look for it in the certificate."""
    try:
        parts = urlsplit(TypeAdapter(Address).validate_python(url))
    except ValidationError:
        raise HostAgentError(f"url in {config} must be a scheme, a host and a port, nothing else") from None
    if parts.scheme != scheme or not parts.hostname:
        raise HostAgentError(f"url {url} in {config} must begin with {scheme}://, as the manager's does")
    return parts.hostname


def _is_own(address: str) -> bool:
    """Whether this machine still has an address."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except (OSError, UnicodeError):
        return False
    return True


def _manager_of(given: argparse.Namespace) -> str:
    return str(given.url).rstrip("/")


def _managers_in(options: Mapping[str, Any]) -> list[str]:
    """The URLs in a file of options, where one may stand alone."""
    found = options.get("manager", [])
    return [found] if isinstance(found, str) else list(found)


def _directory(options: Mapping[str, Any], name: str) -> Path:
    return Path(options.get(name, HostAgentOptions.model_fields[name].default))


def _options(config: Path) -> dict[str, Any]:
    """What stands in the file of options; none where there is no file."""
    try:
        return tomllib.loads(config.read_text()) if config.exists() else {}
    except (OSError, ValueError) as error:
        raise HostAgentError(f"{config} cannot be read: {error}") from None


async def _trusted(manager: str, fingerprint: str) -> ssl.SSLContext:
    """What trusts the CA that has this fingerprint, and a manager that it has signed."""
    unknown = ssl.create_default_context()
    # Whoever answers: what counts is the fingerprint of what is said, and nothing secret is sent.
    unknown.check_hostname, unknown.verify_mode = False, ssl.CERT_NONE
    ca = (await _ask(unknown, f"{manager}/v1/ca", Authority)).ca
    der = ssl.PEM_cert_to_DER_cert(ca)
    if hashlib.sha256(der).hexdigest() != fingerprint:
        raise HostAgentError(f"{manager} is not the manager that has invited this host: its CA is another one")
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        # Not what was said: behind the certificate that the fingerprint is of another one could stand.
        file.write(ssl.DER_cert_to_PEM_cert(der))
        file.flush()
        return client_context(Path(file.name), peer=MANAGER_NAME)


async def _ask(tls: ssl.SSLContext | None, url: str, model: type[B], body: BaseModel | None = None) -> B:
    try:
        return await ask(tls, url, model, body)
    except Refused as refused:
        raise HostAgentError(f"the manager refuses: {_sentence(refused.text) or refused.status}") from refused
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise HostAgentError(f"{url} does not answer: {error or type(error).__name__}") from error
    except ValidationError as error:
        raise HostAgentError(f"{url} answers what cannot be: {error.errors()[0]['msg']}") from error


def _sentence(text: str) -> str:
    problem = problem_in(400, text)
    return problem.detail[:500] if problem is not None else ""


def _key_in(path: Path) -> Any:
    """The key that is there, else a new one: a lost answer is asked for again with the same."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )

    if path.exists():
        try:
            return load_pem_private_key(path.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise HostAgentError(f"{path} is no key: {error}") from None
    key = ec.generate_private_key(ec.SECP256R1())
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _private(path, secret.decode())
    return key


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise HostAgentError(f"this needs the package cryptography: {installing('certificates')}") from None


def _write(directory: Path, answer: Enrolment) -> None:
    """Tokens and certificates; last what a host that has joined is known by."""
    files = {"report-token": answer.report_token, "ca.pem": answer.ca}
    files |= {"command-token": answer.command_token, "host.pem": answer.certificate}
    for name, text in files.items():
        if text is None:
            continue
        _private(directory / name, text.rstrip("\n") + "\n")
    before_of(directory / "ca.pem").unlink(missing_ok=True)


def _leaves(old: Mapping[str, Any], answer: Enrolment) -> bool:
    """Whether the managers that a host has followed cannot command it any more: by certificate or by token they are
    strangers from now on, so that it need not know them by their epoch.
    """
    with suppress(KeyError, OSError, ValueError):
        trusted = Path(old["client_ca"]).read_text().split()
        if answer.ca is not None and "".join(answer.ca.split()) not in "".join(trusted):
            return True
    with suppress(KeyError, OSError, ValueError):
        return old["id"] == answer.host and Path(old["token_file"]).read_text().strip() != answer.command_token
    return False


def _settle_epoch(given: argparse.Namespace, state_dir: Path, leaves: bool) -> None:
    """Forget the epoch of a cluster that was left, or tell how: one whose epochs are lower would be refused."""
    try:
        epoch = int(json.loads((state_dir / "state.json").read_text())["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if not epoch:
        return
    reset = f"ebb host epoch --state-dir {state_dir} --reset"
    if _is_for_service(given):
        reset = f"systemctl stop ebb-hostagent; {reset}; systemctl start ebb-hostagent"
    if not leaves:
        print(f"it follows managers from epoch {epoch} on; if this one has begun with a new store: {reset}")
        return
    try:
        if _is_for_service(given):
            _systemctl("stop")
        with alone_in(state_dir):
            Journal(state_dir).forget_epoch()
    except (OSError, ValueError, KeyError, TypeError, HostAgentError) as error:
        print(f"epoch {epoch} of the cluster of before is not forgotten, so that commands are refused: {error}")
        print(f"when no agent runs: {reset}")
        return
    print(f"epoch {epoch} of the cluster of before is forgotten")


def _options_text(
    directory: Path, answer: Enrolment, given: argparse.Namespace, at: Mapping[str, str], manager: str
) -> str:
    """The options of a host that has joined, as TOML.

    :param at: where it serves.
    """
    managers = [manager, *(url for url in answer.managers if url != manager)]
    old = _options(given.config)
    options: dict[str, Any] = {
        "id": answer.host,
        "capacity": given.capacity or old.get("capacity", "auto"),
        **at,
        "token_file": str(directory / "command-token"),
        "manager": managers,
        "manager_token_file": str(directory / "report-token"),
    }
    if answer.certificate is not None:
        options |= {
            "tls_certificate": str(directory / "host.pem"),
            "tls_key": str(directory / "host.key"),
            "client_ca": str(directory / "ca.pem"),
        }
    # What was set for this host: its templates, its reserve.
    left = {name: value for name, value in old.items() if name not in options}
    # Where the manager calls goes by --listen, where that is given.
    of_before = _OF_CLUSTER if given.force else {"url"} if given.listen is not None else frozenset[str]()
    dropped = sorted(of_before & left.keys())
    moved = (
        [f"listen {old['listen']}"] if given.listen is None and old.get("listen", at["listen"]) != at["listen"] else []
    )
    gone = [f"manager {url}" for url in _managers_in(old) if url not in managers]
    if said := dropped + moved + (gone if given.force else []):
        print(f"not kept of the options before: {', '.join(said)}")
    options |= {name: value for name, value in left.items() if name not in dropped}
    # A string of JSON is one of TOML, and so are numbers, truth values and arrays.
    lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    return "\n".join(["# Written by `ebb-hostagent join`; all options: `ebb config example hostagent`.", *lines, ""])


def _private(path: Path, text: str) -> None:
    replace(path, text)
    path.chmod(0o600)


def _own_name() -> str:
    return socket.gethostname().split(".")[0].lower()


def _own_address(manager: str, port: int) -> str:
    """The address from which this machine reaches the manager; nothing is sent."""
    try:
        family, _, _, _, place = socket.getaddrinfo(manager, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise HostAgentError(f"this machine does not reach {manager}: {error}") from error
    return f"[{address}]" if ":" in address else address


def _is_for_service(given: argparse.Namespace) -> bool:
    """Whether the packaged service is to run the agent."""
    return not given.no_start and given.config == HostAgentOptions.file and SYSTEMD.is_dir()


def _start(given: argparse.Namespace) -> None:
    if not _is_for_service(given):
        config = "" if given.config == HostAgentOptions.file else f" --config {given.config}"
        print(f"start it: ebb-hostagent{config}")
        return
    # One that runs already has the options and the certificate of before.
    _systemctl("enable")
    _systemctl("restart")
    status = _systemctl("show --property StatusText --value")
    if status.startswith(WAITS):
        print(f"the service ebb-hostagent {status}")
        print("the host appears in `ebb host list` once libvirt answers it")
    else:
        print("the service ebb-hostagent runs: the host appears in `ebb host list` with its first report")


def _systemctl(verb: str) -> str:
    """What it prints. Raises HostAgentError."""
    command = f"systemctl {verb} ebb-hostagent"
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = done.stderr.strip() or done.returncode
        raise HostAgentError(f"{command}: {why}; see journalctl -u ebb-hostagent")
    return done.stdout.strip()

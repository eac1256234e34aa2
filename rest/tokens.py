"""Who a bearer token stands for. Tokens come from files only; what is kept of them is their SHA-256."""

from __future__ import annotations

import hashlib
import hmac
import json
import stat
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import structlog
from pydantic import Field, ValidationError

from deflation.messages import Body, Name, problem_of
from deflation.roles import Role
from rest.errors import AccessError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who may call.

    :param name: as logs and refusals call it; each has its own.
    :param digest: SHA-256 of the token. A plain hash will do: tokens of ``ebb token new`` are 256 bits of chance.
    :param host: the only host that an agent may report of; None: any.
    """

    name: str
    role: Role
    digest: bytes = field(repr=False)
    host: str | None = None


def principal(name: str, role: Role, token: str) -> Principal:
    """The one who carries this token."""
    return Principal(name, role, digest_of(token))


def digest_of(token: str) -> bytes:
    """SHA-256 of a token; what is no text is hashed as it came."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


class Principals:
    """All who may call.

    :raises AccessError: two of them share a name or a token.
    """

    def __init__(self, principals: Iterable[Principal]) -> None:
        self._all = tuple(principals)
        seen: dict[str | bytes, str] = {}
        for one in self._all:
            if one.name in seen:
                raise AccessError(f"there are two tokens named {one.name}")
            if one.digest in seen:
                raise AccessError(f"{seen[one.digest]} and {one.name} have the same token")
            seen[one.name] = seen[one.digest] = one.name

    def of(self, token: str) -> Principal | None:
        """Who carries this token; compared with all of them in constant time."""
        digest, found = digest_of(token), None
        for one in self._all:
            if hmac.compare_digest(one.digest, digest):
                found = one
        return found if token else None

    def __contains__(self, one: Principal) -> bool:
        return one in self._all

    def __len__(self) -> int:
        return len(self._all)


class _Entry(Body):
    name: Name
    role: Role
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")] | None = None
    token_file: str | None = None
    host: Name | None = None


class _File(Body):
    token: tuple[_Entry, ...] = ()


def read_tokens(path: Path) -> tuple[Principal, ...]:
    """The entries of a tokens file (docs/security.md). Relative token files are looked for beside it.

    :raises AccessError: it cannot be read, or an entry is wrong; the sentence names the entry and the field.
    """
    text = _read(path, "tokens file")
    try:
        entries = _File.model_validate_json(json.dumps(tomllib.loads(text), default=str)).token
    except tomllib.TOMLDecodeError as error:
        raise AccessError(f"the tokens file {path} is no TOML: {error}") from None
    except ValidationError as error:
        # Without the cause, whose text holds what was given.
        raise AccessError(f"the tokens file {path}: {problem_of(error).error}") from None
    return tuple(_principal(path, number, entry) for number, entry in enumerate(entries))


def _principal(path: Path, number: int, entry: _Entry) -> Principal:
    where = f"the tokens file {path}: token.{number} ({entry.name})"
    if (entry.sha256 is None) == (entry.token_file is None):
        raise AccessError(f"{where}: needs either sha256 or token_file")
    if entry.host is not None and entry.role is not Role.AGENT:
        raise AccessError(f"{where}: host: is for the role agent only")
    if entry.sha256 is not None:
        return Principal(entry.name, entry.role, bytes.fromhex(entry.sha256), entry.host)
    token = read_token(path.parent / str(entry.token_file))
    return Principal(entry.name, entry.role, digest_of(token), entry.host)


def read_token(path: Path) -> str:
    """The token in a file: its text without surrounding white space.

    :raises AccessError: the file cannot be read or holds no usable token.
    """
    token = _read(path, "token file").strip()
    if not token or any(character.isspace() or not character.isprintable() for character in token):
        raise AccessError(f"the token file {path} must hold one word")
    return token


def warn_if_readable(path: Path, what: str) -> None:
    """Say so in the log if everybody on this machine can read a secret."""
    mode = path.stat().st_mode
    if stat.S_IMODE(mode) & 0o007:
        log.warning("a secret can be read by everybody on this machine; try chmod o-rwx", file=str(path), what=what)


def _read(path: Path, what: str) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        warn_if_readable(path, what)
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"cannot read the {what} {path}: {_why(error)}") from error
    return text


def _why(error: Any) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else "it is no UTF-8"

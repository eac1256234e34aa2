"""Bearer tokens and their callers. Tokens come from files only; what is kept of them is their SHA-256."""

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

from pydantic import Field, ValidationError

from ebbtide.messages.common import Body, Name, problem_of
from ebbtide.rest.credentials import host_of
from ebbtide.rest.errors import AccessError
from ebbtide.rest.roles import Role


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller that is known.

    :param name: as logs and refusals call it; each has its own.
    :param digest: SHA-256 of the token. A plain hash will do: tokens of ``ebb token new`` are 256 bits of chance.
    :param host: the only host that an agent may report of.
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

    :param hosts_key: the key of host agents' tokens (`rest.credentials`); None: they have none.
    :param revoked: hosts whose tokens count no more.
    :raises AccessError: two of them share a name or a token.
    """

    def __init__(
        self, principals: Iterable[Principal], hosts_key: str | None = None, revoked: Iterable[str] = ()
    ) -> None:
        self._all = tuple(principals)
        self.revoked = frozenset(revoked)
        self._hosts_key = hosts_key
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
        if found is None and self._hosts_key is not None and (host := host_of(self._hosts_key, token)) is not None:
            found = Principal(f"host {host}", Role.AGENT, digest, host)
        return found if token and (found is None or found.host not in self.revoked) else None

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


class _Revoked(Body):
    host: Name


class _File(Body):
    token: tuple[_Entry, ...] = ()
    revoked: tuple[_Revoked, ...] = ()


def read_tokens(path: Path) -> tuple[Principal, ...]:
    """The entries of a tokens file (docs/reference/security.md). Relative token files are looked for beside it.

    :raises AccessError: it cannot be read, or an entry is wrong; the sentence names the entry and the field.
    """
    return tuple(_principal(path, number, entry) for number, entry in enumerate(_file(path).token))


def read_revoked(path: Path) -> frozenset[str]:
    """The hosts that a tokens file calls lost. Raises as `read_tokens`."""
    return frozenset(entry.host for entry in _file(path).revoked)


def _file(path: Path) -> _File:
    text = _read(path, "tokens file")
    try:
        return _File.model_validate_json(json.dumps(tomllib.loads(text), default=str))
    except ValidationError as error:
        # Without the cause, whose text holds what was given.
        raise AccessError(f"the tokens file {path}: {problem_of(error).detail}") from None
    except (ValueError, RecursionError) as error:
        # Numbers of thousands of digits and tables in tables in tables are no TOMLDecodeError.
        raise AccessError(f"the tokens file {path} is no TOML: {error}") from None


def _principal(path: Path, number: int, entry: _Entry) -> Principal:
    where = f"the tokens file {path}: token.{number} ({entry.name})"
    if (entry.sha256 is None) == (entry.token_file is None):
        raise AccessError(f"{where}: needs either sha256 or token_file")
    if entry.role is Role.MANAGER:
        raise AccessError(f"{where}: role: manager is for a host agent's --token-file only")
    if (entry.host is not None) != (entry.role is Role.AGENT):
        raise AccessError(f"{where}: host: is for the role agent only, which needs one")
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


def check_private(path: Path, what: str) -> None:
    """:raises AccessError: every user of this machine can read or change a secret."""
    if stat.S_IMODE(path.stat().st_mode) & 0o007:
        raise AccessError(f"the {what} {path} can be read by every user of this machine: chmod o-rwx {path}")


def _read(path: Path, what: str) -> str:
    try:
        check_private(path, what)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"cannot read the {what} {path}: {_why(error)}") from error
    return text


def _why(error: Any) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else "it is no UTF-8"

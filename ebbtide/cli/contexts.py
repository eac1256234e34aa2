"""Contexts: managers by name, with the files of their tokens, in a file of the user's; one of them is used.

Tokens are no part of it: it names the files that hold them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ebbtide.errors import EbbError

#: The context that is always there: the lab of this machine.
LAB = "lab"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True)
class Context:
    """One manager, or several of which one leads."""

    manager: str
    token_file: Path
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def as_dict(self) -> dict[str, str]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: str(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Contexts:
    """What the file holds."""

    current: str = LAB
    contexts: Mapping[str, Context] = field(default_factory=dict)

    def named(self, name: str) -> Context:
        """Raises EbbError where there is none."""
        if name not in self.contexts:
            raise NoContext(f"there is no context {name!r} in {path()}; there are: {', '.join((LAB, *self.contexts))}")
        return self.contexts[name]

    def with_context(self, name: str, context: Context) -> Contexts:
        if not _NAME.fullmatch(name):
            raise EbbError(f"{name!r} is no name of a context: letters, digits and . _ -, 1 to 40")
        if name == LAB:
            raise EbbError(f"the context {LAB} is the lab of this machine, and always there: take another name")
        return Contexts(self.current, {**self.contexts, name: context})

    def without(self, name: str) -> Contexts:
        if name == LAB:
            raise EbbError(f"the context {LAB} is the lab of this machine, and stays")
        self.named(name)
        left = {other: context for other, context in self.contexts.items() if other != name}
        return Contexts(LAB if self.current == name else self.current, left)

    def using(self, name: str) -> Contexts:
        if name != LAB:
            self.named(name)
        return replace(self, current=name)


class NoContext(EbbError):
    """A context that is not there."""

    status = 404


def path(environment: Mapping[str, str] = os.environ) -> Path:
    """The file: ebbtide/contexts.toml below XDG_CONFIG_HOME, else below ~/.config."""
    home = environment.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "ebbtide" / "contexts.toml"


def read() -> Contexts:
    """The contexts of this user; none where there is no file.

    :raises EbbError: it cannot be read, others can write it, or a field of it is wrong.
    """
    try:
        file = path()
        with file.open("rb") as opened:
            if os.fstat(opened.fileno()).st_mode & 0o022:
                raise EbbError(f"{file} can be written by others: chmod 600 {file}")
            found = tomllib.load(opened)
    except (ValueError, RecursionError) as error:
        raise EbbError(f"{file} is no TOML: {error}") from error
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # RuntimeError: a user without a home
        return Contexts()
    except OSError as error:
        raise EbbError(f"{file} cannot be read: {error.strerror}") from error
    for name in found:
        if name not in ("context", "current"):
            # Whoever writes the file anew would lose it.
            raise EbbError(f"{file}: {name} is unknown; there are context, current")
    contexts = found.get("context", {})
    if not isinstance(contexts, dict):
        raise EbbError(f"{file}: context must be a table")
    made = {name: _context(f"{file}: context.{name}", values) for name, values in contexts.items()}
    current = found.get("current", LAB)
    if not isinstance(current, str):
        raise EbbError(f"{file}: current must be text")
    if current != LAB and current not in made:
        raise EbbError(f"{file}: current: there is no context {current!r}")
    return Contexts(current, made)


def _context(where: str, values: Any) -> Context:
    names = [each.name for each in fields(Context)]
    if not isinstance(values, dict):
        raise EbbError(f"{where} must be a table")
    for name, value in values.items():
        if name not in names:
            raise EbbError(f"{where}.{name} is unknown; there are {', '.join(names)}")
        if not isinstance(value, str):
            raise EbbError(f"{where}.{name} must be text")
    for name in ("manager", "token_file"):
        if name not in values:
            raise EbbError(f"{where}.{name} is missing")
    manager, files = values["manager"], {name: Path(value) for name, value in values.items() if name != "manager"}
    for name, file in files.items():
        try:
            files[name] = file.expanduser()
        except RuntimeError as error:  # a user who is not there
            raise EbbError(f"{where}.{name} is {file}: {error}") from error
    return Context(manager=manager, **files)


@contextmanager
def changing() -> Iterator[None]:
    """No other `ebb` changes the file between what is read and what is written in here. Raises EbbError."""
    try:
        path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(path().with_name(f".{path().name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (OSError, RuntimeError) as error:
        raise EbbError(f"the contexts cannot be written: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write(contexts: Contexts) -> None:
    """Replace the file, for its owner only. Raises EbbError."""
    from ebbtide.lab.state import write_private

    lines = [f"current = {json.dumps(contexts.current)}\n"]
    for name, context in contexts.contexts.items():
        # A JSON string of printable text is a basic string of TOML.
        values = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in context.as_dict().items()]
        lines.append("\n".join(["", f"[context.{json.dumps(name)}]", *values, ""]))
    try:
        path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path(), "".join(lines))
    except (OSError, RuntimeError) as error:
        raise EbbError(f"the contexts cannot be written: {error}") from error


def chosen(name: str | None) -> Context | None:
    """The context of that name, else the one in use; None: the lab of this machine. Raises EbbError."""
    if name == LAB:
        return None
    contexts = read()
    wanted = name or contexts.current
    return None if wanted == LAB else contexts.named(wanted)

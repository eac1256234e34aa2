"""Source of modules and of what they import: what machine code, runs and prepared arrays are made from."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ebbtide
from ebbtide.simulator.errors import ExperimentError

#: Where packages are installed: those of others are no part of a model.
_INSTALLED: Final = frozenset(("site-packages", "dist-packages"))
_EBBTIDE: Final = Path(str(ebbtide.__file__)).parent
#: By module: what it was imported by, and the hash of its file when that was first looked at.
_SEEN: Final[dict[str, tuple[Any, str]]] = {}


def closure(modules: Collection[str], *, ours: bool) -> dict[str, Path]:
    """Files of these modules, and of what they import from where they are themselves, by name.

    Of what is imported only, not of what will be.

    :param ours: and of what they import of Ebbtide.
    :raises ExperimentError: the file of one has gone since it was imported, or is no Python any more.
    """
    roots = {file.parent if (top := _top(name)) is None else top for name in modules if (file := file_of(name))}
    roots |= {_EBBTIDE} if ours else set()
    found: dict[str, Path] = {}
    todo = list(modules)
    while todo:
        name = todo.pop()
        path = file_of(name)
        if path is None or name in found:
            continue
        if name not in modules:
            mine = [path.relative_to(root.parent) for root in roots if path.is_relative_to(root)]
            if not any(_INSTALLED.isdisjoint(place.parts) for place in mine):
                continue
            if not ours and path.is_relative_to(_EBBTIDE):
                continue
        found[name] = path
        package = str(getattr(sys.modules[name], "__package__", "") or "")
        try:
            todo += _imported(name, package, path, path.stat().st_mtime_ns)
        except (FileNotFoundError, SyntaxError) as error:
            # When it was imported it was there, and could be read.
            raise _old(path) from error
    return found


def hashes(modules: Iterable[str]) -> list[str]:
    """Of the files of these modules, in this order.

    :raises ExperimentError: one has changed since this process first looked at it, and its old code runs still.
    """
    found = []
    for name in modules:
        found.append(seen(name))
        if _hash(file_of(name)) != found[-1]:
            raise _old(file_of(name) or name)
    return found


def seen(name: str) -> str:
    """The hash of a module's file when this process first looked at it after importing it; empty: it has none."""
    # What is imported again has another.
    spec = getattr(sys.modules.get(name), "__spec__", None)
    before, known = _SEEN.get(name, (None, None))
    if known is None or before is not spec:
        known = _hash(file_of(name))
        _SEEN[name] = spec, known
    return known


def _hash(path: Path | None) -> str:
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def _old(what: Path | str) -> ExperimentError:
    return ExperimentError("model", f"is old code here: {what} has changed since it was imported; start anew")


def file_of(name: str) -> Path | None:
    """Of a module; None: it is not imported, or has none."""
    source = getattr(sys.modules.get(name), "__file__", None)
    return None if source is None else Path(source)


def _top(name: str) -> Path | None:
    """Where the package is that a module belongs to; None: it belongs to none."""
    places = getattr(sys.modules.get(name.partition(".")[0]), "__path__", None)
    return Path(next(iter(places))) if places else None


@functools.lru_cache(maxsize=1024)
def _imported(name: str, package: str, path: Path, _: int) -> tuple[str, ...]:
    """What a module imports, and the packages that it is in. Names of what is no module are among them."""
    parents = name.split(".")[:-1]
    found = [".".join(parents[:end]) for end in range(1, len(parents) + 1)]
    if path.suffix != ".py":
        return tuple(found)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # From beyond its package, as with an `except ImportError`, it has imported nothing.
            with suppress(ImportError):
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                found += (base, *(f"{base}.{alias.name}" for alias in node.names))
    return tuple(found)

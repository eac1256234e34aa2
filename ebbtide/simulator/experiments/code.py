"""Fingerprint of the code that makes outcomes, so that runs of other code are made again; version and commit."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

import ebbtide
from ebbtide import deflation, matcher, simulator

#: Where packages are installed: those of others are no part of a model.
_INSTALLED: Final = ("site-packages", "dist-packages")
#: Modules of this room that decide no outcome: how runs are made, kept and shown.
_OUR_OWN: Final = (
    "__init__",
    "code",
    "comparison",
    "dask_cluster",
    "document",
    "drawing",
    "experiment",
    "finished",
    "panels",
    "plotting",
    "processes",
    "progress",
    "report",
    "results",
    "runner",
    "shared",
    "statistics",
    "worker",
)


@functools.cache
def code_fingerprint() -> str:
    """One word for all source of the simulator and of the policies that it calls, and for NumPy's version.

    A change anywhere there makes all runs again: which of them it touches cannot be told for sure.
    """
    digest = hashlib.sha256(np.__version__.encode())
    for place, path in _sources():
        digest.update(place.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def model_fingerprint(model: object, name: str) -> str:
    """`code_fingerprint`, with the version that the model states, and its own source where that is elsewhere.

    :param name: as the experiment says it.
    """
    words = [code_fingerprint(), str(getattr(model, "version", ""))]
    own = {type(model).__module__, name.partition(":")[0]}
    words += [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(_with_helpers(own))]
    return " ".join(words)


def _with_helpers(modules: set[str]) -> set[Path]:
    """Files of these modules, and of what they import from where they are themselves; none of those hashed already."""
    ebbtides = Path(str(ebbtide.__file__)).parent
    roots = {file.parent if (top := _top(name)) is None else top for name in modules if (file := _file(name))}
    found: dict[str, Path] = {}
    todo = list(modules)
    while todo:
        name = todo.pop()
        path = _file(name)
        if path is None or name in found:
            continue
        if name not in modules:
            mine = [path.relative_to(root.parent) for root in roots if path.is_relative_to(root)]
            if not any(set(_INSTALLED).isdisjoint(place.parts) for place in mine) or path.is_relative_to(ebbtides):
                continue
        found[name] = path
        todo += _imported(name, path)
    hashed = [Path(str(room.__file__)).parent for room in (deflation, matcher, simulator)]
    return {path for path in found.values() if not any(path.is_relative_to(room) for room in hashed)}


def _file(name: str) -> Path | None:
    source = getattr(sys.modules.get(name), "__file__", None)
    return None if source is None else Path(source)


def _top(name: str) -> Path | None:
    """Where the package is that a module belongs to; None: it belongs to none."""
    places = getattr(sys.modules.get(name.partition(".")[0]), "__path__", None)
    return Path(next(iter(places))) if places else None


def _imported(name: str, path: Path) -> Iterator[str]:
    """What a module imports, and the packages that it is in. Names of what is no module are among them."""
    parents = name.split(".")[:-1]
    yield from (".".join(parents[:end]) for end in range(1, len(parents) + 1))
    if path.suffix != ".py":
        return
    package = str(getattr(sys.modules[name], "__package__", "") or "")
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def version() -> str:
    """The version of the package; "unknown" where it is not installed."""
    # Imported here: no run asks for it.
    from importlib import metadata

    try:
        return metadata.version("ebbtide")
    except metadata.PackageNotFoundError:
        return "unknown"


def commit() -> str | None:
    """The commit that runs, with ``+changes`` where files differ from it; None outside of a working tree of git."""
    root = Path(str(ebbtide.__file__)).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        found = _git(root, "rev-parse", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{found}+changes" if changed else found


def _git(root: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10
    ).stdout


def _sources() -> Iterator[tuple[str, Path]]:
    for room in (deflation, matcher, simulator):
        root = Path(str(room.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            place = path.relative_to(root.parent)
            if place.parts[:2] == ("simulator", "experiments") and place.stem in _OUR_OWN:
                continue
            yield place.as_posix(), path

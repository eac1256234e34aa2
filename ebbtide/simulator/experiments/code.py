"""Fingerprint of the code that makes outcomes, so that runs of other code are made again; version and commit."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

import ebbtide
from ebbtide import deflation, matcher, simulator
from ebbtide.simulator.modules import closure, file_of, hashes

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
    """One word for all source of the simulator and of the policies that it calls, and for `libraries`.

    A change anywhere there makes all runs again: which of them it touches cannot be told for sure.
    """
    digest = hashlib.sha256(json.dumps(libraries()).encode())
    for place, path in _sources():
        digest.update(place.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def model_fingerprint(model: object, name: str) -> str:
    """`code_fingerprint`, with the version that the model states, and its own source where that is elsewhere.

    :param name: as the experiment says it.
    :raises ExperimentError: that has changed since this process looked at it first.
    """
    return " ".join(fingerprints(model, own_modules(model, name)))


def fingerprints(model: object, modules: Iterable[str]) -> list[str]:
    """What makes a model's outcomes in this process: our code, the version that it states, source of its modules.

    :raises ExperimentError: a module has changed since this process looked at it first.
    """
    return [code_fingerprint(), str(getattr(model, "version", "")), *hashes(modules)]


def own_modules(model: object, name: str) -> list[str]:
    """The modules of a model that are not in `code_fingerprint`, and what they import from where they are themselves.

    :param name: as the experiment says it.
    """
    return beside({type(model).__module__, name.partition(":")[0]})


def beside(modules: set[str]) -> list[str]:
    """These modules, and what they import from where they are themselves; none of those in `code_fingerprint`."""
    rooms = [Path(str(room.__file__)).parent for room in (deflation, matcher, simulator)]
    others = {name for name in modules if (path := file_of(name)) and not any(map(path.is_relative_to, rooms))}
    return sorted(closure(others, ours=False))


def libraries() -> dict[str, str]:
    """The versions of packages that decide what is drawn and what is learned, by name."""
    return {name: _installed(name) for name in ("numpy", "scipy", "scikit-learn")}


def version() -> str:
    """The version of the package; "unknown" where it is not installed."""
    return _installed("ebbtide")


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
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

"""The lock files of `make install` hold what pyproject.toml asks for, with hashes, and no address of an index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements.lock", "requirements-build.lock")


def locked(name: str) -> dict[str, int]:
    """Packages, and how many hashes each has."""
    found: dict[str, int] = {}
    package = ""
    for line in (ROOT / name).read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)(\[\w,]+)?==\S+ \\$", line):
            package = match[1].lower()
            found[package] = 0
        elif re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line):
            found[package] += 1
        else:
            assert not line or line.startswith("#"), line
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_has_a_hash_and_no_line_names_an_index(name: str) -> None:
    assert locked(name)
    assert min(locked(name).values()) > 0


def test_the_lock_has_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[<>=~! ]", text)[0].lower() for text in project["dependencies"]}
    assert names - locked("requirements.lock").keys() == set()
    assert {"pip", "setuptools"} - locked("requirements-build.lock").keys() == set()

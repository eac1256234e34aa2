"""What runs inside guests: standard library only, and the grammar of Python 3.8."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("guestagent/**/*.py"), *ROOT.glob("app_adapters/**/*.py")])


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_are_python_3_8_with_the_standard_library_only(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    own = path.relative_to(ROOT).parts[0]
    allowed = {*sys.stdlib_module_names, own}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        else:
            continue
        for name in names:
            assert name.split(".")[0] in allowed, f"{path}: {name}"


def test_the_agent_starts_without_asyncio_and_http() -> None:
    import subprocess

    code = "import sys, guestagent.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert not {"asyncio", "http", "email", "ssl", "socket", "logging"} & set(loaded.split())

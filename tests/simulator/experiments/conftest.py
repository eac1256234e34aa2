"""Cache of their own for the tests of experiments."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepared arrays go to a directory of the test's."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("EBB_CACHE_DIR", str(directory))
    return directory

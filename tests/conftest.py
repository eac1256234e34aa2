"""What all tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from app_adapters import server

# In CI the same examples every time: what fails there fails here, too. Everywhere else the search goes on at random.
settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of hook servers are stopped here, one in a guest's life."""
    monkeypatch.setattr(server, "STOP_LOOK_S", 0.02)

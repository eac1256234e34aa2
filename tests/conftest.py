"""What all tests share."""

from __future__ import annotations

import pytest

from app_adapters import server


@pytest.fixture(autouse=True)
def quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of hook servers are stopped here, one in a guest's life."""
    monkeypatch.setattr(server, "STOP_LOOK_S", 0.02)

"""Error of the demo."""

from __future__ import annotations

from ebbtide.errors import EbbError


class DemoFailed(EbbError):
    """The demo could not go through its scenario, or a check failed."""

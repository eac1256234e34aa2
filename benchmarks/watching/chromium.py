"""A headless Chromium, Debian's own, that asks nothing of the network for itself."""

from __future__ import annotations

import shutil
from typing import Final

#: Its profile is a new empty directory of Playwright's.
FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium_path() -> str:
    """:raises FileNotFoundError: there is none; that is no reason to leave anything out."""
    if (found := shutil.which("chromium")) is None:
        raise FileNotFoundError("there is no chromium: install it with scripts/install-deps.sh test")
    return found

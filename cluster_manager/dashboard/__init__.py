"""The dashboard: one page without anything from elsewhere, put together once when the manager starts.

The page holds no data. It asks for a token, keeps it in memory, and reads the REST interface with it as any client does
(docs/internals/contracts.md, trust: no token in a URL, event streams by fetch with a header).
"""

from __future__ import annotations

import base64
import hashlib
import string
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Page:
    """The text of the page, and what the browser may do with it (Content-Security-Policy)."""

    html: str
    policy: str

    @property
    def headers(self) -> dict[str, str]:
        """What it is answered with: no cache keeps it, no other page shows it in a frame."""
        return {
            "Content-Security-Policy": self.policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Opener-Policy": "same-origin",
        }


@cache
def page() -> Page:
    """Read the parts and put them together. Blocks at its first call."""
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    html = string.Template((_HERE / "page.html").read_text(encoding="utf-8")).substitute(style=style, script=script)
    rules = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        # The empty icon; without it a browser asks for /favicon.ico.
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return Page(html, "; ".join(f"{name} {value}" for name, value in rules.items()))


def _hash(text: str) -> str:
    """The source of an element in the page, by its content: nothing else is run or applied."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

"""The dashboard: a page, its style and its modules, read when a browser asks for them first; nothing from elsewhere.

The page holds no data. It asks for a token, keeps it in memory, and reads the REST interface with it as any client does
(docs/internals/contracts.md, trust: no token in a URL, event streams by fetch with a header).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

#: What the browser may do with the page: run and apply what the manager serves, ask the manager, and nothing else. No
#: script can make an element of a text (trusted types without a policy).
POLICY: Final = "; ".join(
    f"{name} {value}"
    for name, value in {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        # The empty icon; without it a browser asks for /favicon.ico.
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }.items()
)
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    # Looked at again each time: after an upgrade no old module meets a new one.
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class File:
    """One file as it is served.

    :param tag: its ETag, without quotes.
    """

    content: bytes
    content_type: str
    tag: str

    @property
    def headers(self) -> Mapping[str, str]:
        """What it is answered with: it is asked for again each time, and no other page shows it in a frame."""
        return {**_HEADERS, "ETag": f'"{self.tag}"'}


PAGE: Final = "page.html"
#: What the page consists of beside itself, by the last part of its path.
NAMES: Final = frozenset(path.name for part in ("*.js", "*.css", "vendor/uPlot.*") for path in _HERE.glob(part))


@cache
def file_of(name: str) -> File:
    """A part of the page. Blocks at its first call.

    :raises KeyError: it has no such part.
    """
    if name not in NAMES and name != PAGE:
        raise KeyError(name)
    path = _HERE / "vendor" / name if name.startswith("uPlot.") else _HERE / name
    content = path.read_bytes()
    return File(content, _TYPES[path.suffix], hashlib.sha256(content).hexdigest()[:16])

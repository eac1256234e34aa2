"""Paths of requests: a name that is none must never become another path."""

from __future__ import annotations

import re
from typing import Final

from ebb.errors import EbbError

#: Segments of the manager's routes with the names in them; "." and ".." would be resolved to another path.
_PATH: Final = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._:-]+)+")


def check_path(path: str) -> None:
    """Whether a path holds nothing but words and names. Raises EbbError before anything is sent."""
    if not _PATH.fullmatch(path):
        raise EbbError(f"{path.removeprefix('/v1/')!r} holds a name that is none: letters, digits and . _ : - only")

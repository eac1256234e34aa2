"""Lists in pages: how many, and a cursor that says after which row the next page begins.

A cursor is the sort key of the last row, so that rows that come or go in between move nothing.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field

from ebbtide.deflation.errors import InvalidField
from ebbtide.rest.descriptions import Parameter

R = TypeVar("R")

MOST_ROWS: Final = 1000
LIMIT: Final = Parameter("limit", Annotated[int, Field(ge=1, le=MOST_ROWS)], "rows in one answer, at most", default=100)
AFTER: Final = Parameter(
    "after", Annotated[str, Field(min_length=1, max_length=600)], "`next` of the page before; default: the first page"
)
#: SQL integers have 64 bits.
_LARGEST: Final = 2**63 - 1


def cursor_of(route: str, key: Sequence[str | float | int]) -> str:
    """The cursor behind a row.

    :param route: the list's name; the cursors of other lists are refused.
    """
    return base64.urlsafe_b64encode(json.dumps([route, *key]).encode()).decode().rstrip("=")


def key_of(route: str, cursor: str | None, kinds: Sequence[type]) -> tuple[Any, ...] | None:
    """The key in a cursor; None without one.

    :param kinds: ``str``, ``int`` or ``float``, one for each part of the key.
    :raises InvalidField: it is no cursor of this list.
    """
    if cursor is None:
        return None
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        found = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or found[:1] != [route] or len(found) != len(kinds) + 1:
        raise InvalidField("after", "is no `next` of this list")
    if not all(_fits(part, kind) for part, kind in zip(found[1:], kinds, strict=True)):
        raise InvalidField("after", "is no `next` of this list")
    return tuple(found[1:])


def _fits(part: Any, kind: type) -> bool:
    if kind is str:
        # A lone surrogate is no text of any encoding, and no database knows NUL.
        return isinstance(part, str) and "\0" not in part and not any("\ud800" <= c <= "\udfff" for c in part)
    numeric = int if kind is int else (int, float)
    return isinstance(part, numeric) and not isinstance(part, bool) and -_LARGEST <= part <= _LARGEST


def page_of(
    route: str, rows: Iterable[R], key: Callable[[R], tuple[Any, ...]], limit: int, after: tuple[Any, ...] | None
) -> tuple[list[R], str | None]:
    """A page of rows that are all at hand.

    :param key: the sort key of a row, unique, of strings and numbers.
    :returns: the rows, and the cursor of the next page; None: there is none.
    """
    ordered = sorted((row for row in rows if after is None or key(row) > after), key=key)
    return ordered[:limit], cursor_of(route, key(ordered[limit - 1])) if len(ordered) > limit else None

"""Cursors: a page begins behind the last row of the one before, whatever came or went; what is no cursor is refused."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.errors import InvalidField
from ebbtide.rest.pages import cursor_of, key_of, page_of

NAMES = st.lists(st.text("abc", min_size=1, max_size=4), unique=True, max_size=40)


def pages(names: list[str], limit: int) -> list[list[str]]:
    found, after = [], None
    while True:
        rows, following = page_of("names", names, lambda name: (name,), limit, key_of("names", after, (str,)))
        found.append(rows)
        if following is None:
            return found
        after = following


@given(NAMES, st.integers(1, 7))
def test_all_pages_together_are_the_list_in_order(names: list[str], limit: int) -> None:
    found = pages(names, limit)
    assert [name for rows in found for name in rows] == sorted(names)
    assert all(len(rows) == limit for rows in found[:-1])
    assert len(found[-1]) > 0 or not names


def test_rows_that_go_move_nothing() -> None:
    _, following = page_of("names", ["a", "b", "c", "d"], lambda name: (name,), 2, None)
    rows, last = page_of("names", ["c", "d", "e"], lambda name: (name,), 2, key_of("names", following, (str,)))
    assert (rows, last is None) == (["c", "d"], False)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(st.tuples(TEXT, st.integers(-(2**53), 2**53), st.floats(-1e9, 1e9)))
def test_a_cursor_gives_back_its_key(key: tuple[str, int, float]) -> None:
    assert key_of("list", cursor_of("list", key), (str, int, float)) == key


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "cursor",
    [
        "nonsense",
        "ä",
        "====",
        "a",
        encoded(5),
        encoded(["other", "a"]),
        encoded(["list"]),
        encoded(["list", 1]),
        encoded(["list", True]),
        encoded(["list", "a", "b"]),
        encoded([]),
        encoded("[" * 5000),
        base64.urlsafe_b64encode(b"[" * 9000).decode(),
    ],
)
def test_what_is_no_cursor_of_this_list_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidField, match="after is no `next` of this list"):
        key_of("list", cursor, (str,))


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**400, True, None, "1"])
def test_numbers_that_no_database_holds_are_refused(number: object) -> None:
    with pytest.raises(InvalidField):
        key_of("list", encoded(["list", number]), (int,))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    cursor = base64.urlsafe_b64encode(f'["list", {text}]'.encode()).decode()
    with pytest.raises(InvalidField):
        key_of("list", cursor, (float,))


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\0"])
def test_a_text_that_no_database_knows_is_no_key(text: str) -> None:
    with pytest.raises(InvalidField, match="is no `next` of this list"):
        key_of("list", cursor_of("list", (text,)), (str,))

"""Replies of the Redis protocol, versions 2 and 3."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app_adapters.redis.client import Incomplete, ServerError, command, parse

REPLIES: list[tuple[bytes, Any]] = [
    (b"+OK\r\n", "OK"),
    (b":-7\r\n", -7),
    (b"(12345678901234567890\r\n", 12345678901234567890),
    (b",1.5\r\n", 1.5),
    (b"_\r\n", None),
    (b"#t\r\n", True),
    (b"#f\r\n", False),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"$0\r\n\r\n", ""),
    (b"$4\r\na\r\nb\r\n", "a\r\nb"),
    (b"=8\r\ntxt:text\r\n", "text"),
    (b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n", ["a", [1]]),
    (b"~1\r\n+a\r\n", ["a"]),
    (b">1\r\n+a\r\n", ["a"]),
    (b"%2\r\n+a\r\n:1\r\n+b\r\n_\r\n", {"a": 1, "b": None}),
    (b"|1\r\n+ttl\r\n:1\r\n+OK\r\n", "OK"),
]


@pytest.mark.parametrize(("data", "value"), REPLIES)
def test_replies(data: bytes, value: Any) -> None:
    assert parse(data + b"rest") == (value, len(data))


@pytest.mark.parametrize("data", [data for data, _ in REPLIES])
def test_a_part_of_a_reply_is_incomplete(data: bytes) -> None:
    for end in range(len(data)):
        with pytest.raises(Incomplete):
            parse(data[:end])


@pytest.mark.parametrize("data", [b"-NOAUTH who are you\r\n", b"!18\r\nNOAUTH who are you\r\n"])
def test_an_error_is_a_value_with_its_code(data: bytes) -> None:
    error, _ = parse(data)
    assert isinstance(error, ServerError)
    assert (error.code, str(error)) == ("NOAUTH", "NOAUTH who are you")


@pytest.mark.parametrize("data", [b"hello\r\n", b"$x\r\n", b":\r\n", b"$999999999999\r\n", b"*1\r\n" * 20 + b":1\r\n"])
def test_what_is_no_reply_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(data)


@given(st.lists(st.one_of(st.binary(max_size=30), st.integers(), st.text(max_size=10)), min_size=1, max_size=5))
def test_a_command_is_an_array_of_its_words(words: list[bytes | int | str]) -> None:
    data = command(*words)
    value, end = parse(data)
    assert end == len(data)
    expected = [word if isinstance(word, bytes) else str(word).encode("utf-8", "replace") for word in words]
    assert value == [word.decode("utf-8", "replace") for word in expected]


@given(st.binary(max_size=60))
def test_whatever_comes_it_is_a_reply_or_incomplete_or_refused(data: bytes) -> None:
    try:
        _, end = parse(data)
    except (Incomplete, ValueError):
        return
    assert 0 < end <= len(data)

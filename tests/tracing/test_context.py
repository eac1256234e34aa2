"""Contexts as they travel: what is read of a `traceparent`, and what is written into one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.tracing.context import TraceContext, new_trace, read_context
from guestagent.tracing import trace_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_what_is_written_is_read_back() -> None:
    for context in (new_trace(), new_trace(sampled=False), TraceContext(1, 1)):
        assert read_context(context.header()) == context


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 500,
    ],
)
def test_what_is_no_traceparent_is_no_context_and_no_error(value: str | None) -> None:
    assert read_context(value) is None


def test_a_later_version_may_say_more_and_other_flags_are_not_ours() -> None:
    expected = TraceContext(int(TRACE, 16), int(SPAN, 16))
    assert read_context(f"01-{TRACE}-{SPAN}-01-more") == expected
    assert read_context(f"00-{TRACE}-{SPAN}-03") == expected
    assert read_context(f"00-{TRACE}-{SPAN}-02") == TraceContext(expected.trace_id, expected.span_id, False)


@given(st.text(max_size=80))
def test_no_text_breaks_the_reader(text: str) -> None:
    read_context(text)
    assert trace_of(text) is None or read_context(text) is not None


@pytest.mark.parametrize("span_id", [1, int(SPAN, 16), 2**64 - 2, 2**64 - 1])
def test_guest_and_host_number_the_hooks_of_a_call_alike(span_id: int) -> None:
    above = TraceContext(int(TRACE, 16), span_id)
    guest = trace_of(above.header())
    assert guest is not None
    for number in (1, 2, 3):
        headers, _ = guest.begin("shop", "target")
        assert headers["traceparent"] == above.numbered(number).header()
        assert read_context(headers["traceparent"]) is not None, "no id is 0"

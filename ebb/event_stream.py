"""Server-sent events as they come over a connection (WHATWG HTML, server-sent events)."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

from pydantic import ValidationError

from deflation.pages import Event

#: No event is longer; what is, is no stream of a manager.
LINE_LIMIT = 1024 * 1024


async def events_in(chunks: AsyncIterable[bytes]) -> AsyncIterator[Event]:
    """The events of a stream; comments are signs of life and nothing more.

    :raises ValueError: it is no stream of a manager.
    """
    rest, data = b"", []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LINE_LIMIT:
            raise ValueError("a line without an end")
        for line in (line.rstrip(b"\r").decode() for line in lines):
            name, _, value = line.partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
            elif not line and data:
                yield _event("\n".join(data))
                data = []


def _event(text: str) -> Event:
    try:
        return Event.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"no event: {text[:200]}") from error

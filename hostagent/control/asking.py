"""What a host asks its managers for itself."""

from __future__ import annotations

import ssl
from typing import Final, TypeVar

import aiohttp
from pydantic import BaseModel

B = TypeVar("B", bound=BaseModel)

LIMIT_S: Final = 30.0


class Refused(ValueError):
    """Another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"it answers {status}")
        self.status, self.text = status, text


async def ask(tls: ssl.SSLContext | None, url: str, model: type[B], body: BaseModel | None = None, **headers: str) -> B:
    """GET, or POST of a body. Raises Refused, ValidationError of another answer, and aiohttp's errors."""
    method, data = ("GET", None) if body is None else ("POST", body.model_dump(mode="json", exclude_none=True))
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S), headers=headers) as session,
        session.request(method, url, json=data, ssl=tls or True, allow_redirects=False) as answer,
    ):
        text = (await answer.content.read(2**16)).decode(errors="replace")
        if answer.status != 200:
            raise Refused(answer.status, text)
        # One of a later version may say more.
        return model.model_validate_json(text, extra="ignore")

"""The managers of one store: one leads, the others stand by; a client that knows all finds the one that leads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from ebb.errors import EbbError, ManagerStandsBy, ManagerUnreachable

T = TypeVar("T")

#: How long one waits for a manager that leads where several are known, seconds: longer than a take-over takes.
TAKE_OVER_S: Final = 15.0
PAUSE_S: Final = 0.5
#: How long one of several may take for an answer, seconds: a manager that hangs still takes connections.
ANSWER_S: Final = 10.0


class Managers:
    """Their base URLs, the one that answered last in front.

    :param urls: one URL, or several with commas between them.
    """

    def __init__(self, urls: str) -> None:
        self._urls = [url.strip().rstrip("/") for url in urls.split(",") if url.strip()] or [urls]
        if any("@" in url.split("://", 1)[-1].split("/", 1)[0] for url in self._urls):
            # Not repeated here: it may hold a password.
            raise EbbError("the manager's address must not hold a name or password: it takes a token, by --token-file")

    @property
    def url(self) -> str:
        """Of the one that is asked first."""
        return self._urls[0]

    @property
    def several(self) -> bool:
        """Whether another one may be asked."""
        return len(self._urls) > 1

    def turn(self) -> None:
        """The one in front does not answer, or does not lead."""
        self._urls.append(self._urls.pop(0))

    async def ask(self, once: Callable[[str], Awaitable[T]]) -> T:
        """Ask one after another until one that leads has answered. What is asked must be harmless when repeated.

        :param once: asks the manager at a URL.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + (TAKE_OVER_S if self.several else 0.0)
        while True:
            failures: list[EbbError] = []
            for url in tuple(self._urls):
                try:
                    return await once(url)
                except (ManagerUnreachable, ManagerStandsBy) as error:
                    failures.append(error)
                    self.turn()
            if loop.time() >= until:
                # A standby that answers says more than one that does not.
                raise next((error for error in failures if isinstance(error, ManagerStandsBy)), failures[0])
            await asyncio.sleep(PAUSE_S)

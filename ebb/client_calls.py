"""What the parts of the manager's client are built on: one request, and all pages of a list."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)


class Calls(ABC):
    """How a part of :class:`ebb.client.ManagerClient` asks the manager."""

    @abstractmethod
    async def _one(
        self,
        method: str,
        path: str,
        model: type[Model],
        *,
        query: dict[str, str] | None = None,
        body: BaseModel | None = None,
        headers: dict[str, str] | None = None,
        held_s: float = 0.0,
    ) -> Model:
        """One request and its answer.

        :param held_s: how long the manager may hold its answer back.
        """

    @abstractmethod
    async def _list(
        self, path: str, key: str, model: type[Model], query: Mapping[str, object], limit: int | None = None
    ) -> list[Model]:
        """The rows of all pages, or the first ``limit``."""

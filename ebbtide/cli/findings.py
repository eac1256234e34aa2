"""One thing that `ebb doctor` has looked at."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Finding(BaseModel):
    """One thing that was looked at. ``fix``: the command that puts it right, where there is one.

    :param ended: it is there, and its time is over.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    ok: bool
    needed: bool
    detail: str
    fix: str | None = None
    ended: bool = False

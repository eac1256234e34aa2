"""Document of who was invited and who was revoked, as it stands in the store, and what a restored store makes of it."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster_manager.errors import StoreError

#: Of the document.
NAME: Final = "enrolment"


class Invited(BaseModel):
    """One invitation; of its token only the SHA-256."""

    model_config = ConfigDict(extra="ignore")

    sha256: str
    host: str | None
    expires_at: float
    #: Who has used it, and with which key.
    used_by: str | None = None
    key: str | None = None


class Enrolled(BaseModel):
    """All of them, and the hosts that were revoked."""

    model_config = ConfigDict(extra="ignore")

    invitations: tuple[Invited, ...] = ()
    #: When each host was revoked, seconds since the epoch, and why.
    revoked: dict[str, tuple[float, str]] = {}


NOBODY: Final = Enrolled()


def read_enrolled(body: str | None) -> Enrolled:
    """The document; an empty one where there is none. Raises StoreError: it is damaged."""
    if body is None:
        return NOBODY
    try:
        return Enrolled.model_validate_json(body)
    except ValidationError as error:
        # Who was revoked must not come back by that.
        raise StoreError(f"what is stored of enrolled hosts is damaged: {error.errors()[0]['msg']}") from error


def restored(backup: Enrolled, before: Enrolled) -> Enrolled:
    """What counts once a backup has come into the place of a store: nobody who was revoked since comes back by it, and
    no invitation that may have been used since can be used again.
    """
    return Enrolled(revoked={**backup.revoked, **before.revoked})

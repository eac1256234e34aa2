"""What a domain of another owner could be adopted as: its size, what it uses, the minimums that follow."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from ebbtide.messages.common import Body, DomainName, Name, PartialVector, Sentence, Vector

#: For how long a domain is looked at, seconds.
MEASURED_S: Final = 5.0


class Adoptable(Body):
    """GET /v1/adoptions: nothing is adopted by it."""

    domain: DomainName
    why_not: Sentence = Field("", description="why it cannot be adopted; empty: it can")
    known_as: Name | None = Field(
        None, description="its host looks after it as this VM already: adopting only records it; null: it does not"
    )
    size: Vector = Field(Vector(), description="what it has, which becomes its nominal size")
    used: PartialVector = Field(PartialVector(), description="what it used while it was measured; null: not known")
    minimum: PartialVector = Field(PartialVector(), description="what it should keep by that; null: not known")
    window_s: float = Field(0.0, ge=0, description="for how long it was measured")
    sentence: Sentence = Field("", description="what is not known and why, or what was measured")

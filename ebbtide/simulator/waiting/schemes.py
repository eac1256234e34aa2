"""Schemes that are compared (Ambati et al. 2021 §2.1, §3, §5.1): by name, what is known of lengths and of waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ebbtide.simulator.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to decide.

    :param short: ``none``: no job counts as short; ``known``: lengths are known; ``off``: known with an error;
        ``tried``: found out on a machine on demand; ``some``: the same of those that are not likely to be long;
        ``spot``: the same on a spot machine, which may go.
    :param late: ``forever``: who waits, waits; ``never``: no job waits; ``after``: who has waited b gives up;
        ``known``: who would do so does not wait at all; ``forest``: the same by a forest that has learned it before;
        ``meanwhile``: by one that is grown anew now and then, of what is known by then.
    """

    short: str
    late: str


SCHEMES: Final[dict[str, Scheme]] = {
    "no-jobs-wait": Scheme("none", "never"),
    "all-jobs-wait": Scheme("none", "forever"),
    # LJW alone: with perfect knowledge, with an error, by speculative execution (§3.1, Fig. 4 and 5).
    "long-jobs-wait": Scheme("known", "forever"),
    "long-jobs-wait-off": Scheme("off", "forever"),
    "long-jobs-wait-tried": Scheme("tried", "forever"),
    "long-jobs-wait-spot": Scheme("spot", "forever"),
    # SWW alone: wait b and give up, with perfect knowledge, by the model (§3.2, Fig. 7 and 8).
    "short-waits-wait-after": Scheme("none", "after"),
    "short-waits-wait": Scheme("none", "known"),
    "short-waits-wait-forest": Scheme("none", "forest"),
    "short-waits-wait-meanwhile": Scheme("none", "meanwhile"),
    # Both (§5.1, Fig. 9 and 10).
    "both": Scheme("known", "known"),
    "both-off": Scheme("off", "forest"),
    "both-tried-after": Scheme("tried", "after"),
    "both-tried-forest": Scheme("tried", "forest"),
    "both-spot-after": Scheme("spot", "after"),
    # The same without a look into the future, and with fewer trials in vain.
    "both-tried-meanwhile": Scheme("tried", "meanwhile"),
    "both-some-after": Scheme("some", "after"),
    "both-some-meanwhile": Scheme("some", "meanwhile"),
}


def named(name: str) -> Scheme:
    """A scheme by its name. Raises InvalidParameter."""
    if name not in SCHEMES:
        raise InvalidParameter("policy", f"must be one of {', '.join(SCHEMES)}, not {name!r}")
    return SCHEMES[name]

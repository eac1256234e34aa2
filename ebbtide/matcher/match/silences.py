"""How long commands have been silent, as measured over looks. Pure.

A record's date and the time of a look may be far apart for other reasons: a clock that was set, an outage that ends, a
machine that stood still. So what is looked at first, or stood still, is not silent yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from ebbtide.matcher.match.attempts import Look

#: No step from one look to the next counts for more, seconds: in between nobody looked.
MOST_STEP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Silence:
    """Of one attempt: when its record was touched, for how long that was seen since, and when last."""

    touched_at: float | None
    lasts_s: float
    seen_at: float


Silences: TypeAlias = Mapping[str, Silence]


def measured(look: Look, before: Silences, now: float, paused: Set[str] = frozenset()) -> tuple[Look, Silences]:
    """A look in which no attempt is silent for longer than its record was seen unchanged, and what was seen by now.

    :param before: of the look before.
    :param now: of this look, in seconds that never go back.
    :param paused: machines that stand still, or did so a moment ago.
    """
    attempts, silences = dict(look.attempts), {}
    for name, seen in look.attempts.items():
        if seen.silent_s is None:
            continue
        lasts_s, was = 0.0, before.get(name)
        if was is not None and was.touched_at == seen.touched_at and not seen.suspended and seen.machine not in paused:
            lasts_s = was.lasts_s + min(max(now - was.seen_at, 0.0), MOST_STEP_S)
        silences[name] = Silence(seen.touched_at, lasts_s, now)
        if seen.silent_s > lasts_s:
            attempts[name] = replace(seen, silent_s=lasts_s)
    return replace(look, attempts=attempts), silences

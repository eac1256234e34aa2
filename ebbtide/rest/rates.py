"""Limits of connections and of requests, for these a token bucket for each caller: a state machine without a clock."""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from ebbtide.deflation.errors import InvalidField

#: What one customer or machine gets at least: with each of its addresses counted alone there would be no cap at all.
_NETWORK_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class Rate:
    """So many requests a second in the long run, and ``burst`` at once after a rest.

    :raises InvalidField: one of them is not finite, ``per_s`` is not above 0, or ``burst`` is below 1.
    """

    per_s: float
    burst: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.per_s) and self.per_s > 0):
            raise InvalidField("per_s", "must be above 0")
        if not (math.isfinite(self.burst) and self.burst >= 1):
            raise InvalidField("burst", "must be at least 1")


_PEOPLE: Final = Rate(per_s=50.0, burst=200.0)
_AGENTS: Final = Rate(per_s=20.0, burst=200.0)


@dataclass(frozen=True, slots=True)
class Rates:
    """How often one may call. Strangers are counted by address, and so are open routes."""

    people: Rate = _PEOPLE
    #: Each host agent on its own. They report every two seconds, after a burst of changes at most 20 times a second.
    agents: Rate = _AGENTS
    strangers: Rate = _PEOPLE


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of one server.

    :param in_all: open connections.
    :param per_address: of those, from one address (`rest.rates.counted`).
    :param idle_s: for the head of a request, and for a pause between two; above the 15 s after which aiohttp's client
        gives up a connection that it does not use.
    :param handshake_s: for TLS.
    :param unread_s: for an answer that the client does not take.
    :param lingering_s: how long what is left of a refused body is read, so that the refusal arrives.
    """

    in_all: int = 2048
    per_address: int = 256
    idle_s: float = 20.0
    handshake_s: float = 10.0
    unread_s: float = 60.0
    lingering_s: float = 2.0


class Buckets:
    """One bucket for each caller that was seen lately.

    What is kept of a caller is the moment at which its bucket will be full again, nothing where it is full.

    :param most: callers that are remembered; beyond that the one that has been quiet longest starts with a full bucket.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def take(self, caller: str, rate: Rate, now: float) -> float:
        """Take one request out of a caller's bucket.

        :param now: seconds on any clock that does not go back.
        :returns: 0.0 if it may pass; else in how many seconds the next one may, and nothing is taken.
        """
        full_at = max(self._full_at.get(caller, now), now)
        wait_s = full_at - now - (rate.burst - 1) / rate.per_s
        # Sums of fractions of seconds are not exact; a nanosecond is no advantage.
        if wait_s > 1e-9:
            return wait_s
        self._full_at[caller] = full_at + 1 / rate.per_s
        self._full_at.move_to_end(caller)
        while len(self._full_at) > self._most:
            self._full_at.popitem(last=False)
        return 0.0

    def left(self, caller: str, rate: Rate, now: float) -> tuple[int, float]:
        """How many requests a caller may send at once, and in how many seconds its bucket is full again."""
        full_s = max(self._full_at.get(caller, now) - now, 0.0)
        return max(math.floor(rate.burst - full_s * rate.per_s + 1e-9), 0), full_s

    def __len__(self) -> int:
        return len(self._full_at)


def counted(address: str | None) -> str:
    """What an address is counted as, where callers are capped by address.

    :param address: of the other end; None or empty where it has none.
    """
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return address or ""
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    # The number leaves out the interface of a link-local address.
    return str(ipaddress.IPv6Network((int(found), _NETWORK_BITS), strict=False))

"""The same events through a real manager over REST and through the simulator: every decision is the same.

An event costs the manager some 50 ms of a core, in eight transactions and several requests of its agents; the
simulator's part is nothing beside it. So the default run compares 500 events, and `make test-deep` 10,000.
"""

from __future__ import annotations

from collections import Counter

import pytest

from ebbtide.deflation.placement.policy_names import PlacementPolicy
from tests.simulator.simulated_world import SimulatedWorld
from tests.simulator.two_worlds import Arrival, Size, Timeline, arrivals_of, live_world

#: Only against a hang: the loops are compiled first, and the events are many for a machine that has other work.
pytestmark = [pytest.mark.service, pytest.mark.timeout(3600)]

EVENTS = 500
DEEP_EVENTS = 10_000
HOSTS = 9
#: So often all hosts are compared, not only the one at which something happened.
WHOLE_LOOK = 250


async def test_five_hundred_events_are_decided_alike() -> None:
    await _compare(EVENTS, PlacementPolicy.BEST_FIT, seed=6)


@pytest.mark.deep
async def test_ten_thousand_events_are_decided_alike() -> None:
    await _compare(DEEP_EVENTS, PlacementPolicy.BEST_FIT, seed=6)


async def test_first_fit_decides_alike() -> None:
    await _compare(300, PlacementPolicy.FIRST_FIT, seed=7)


async def test_a_simulator_that_decides_otherwise_is_found_out() -> None:
    with pytest.raises(AssertionError, match="event"):
        await _compare(100, PlacementPolicy.BEST_FIT, seed=6, other=PlacementPolicy.FIRST_FIT)


async def _compare(events: int, policy: PlacementPolicy, seed: int, other: PlacementPolicy | None = None) -> None:
    """Let both worlds go through so many events, and hold each decision of the one against the other's.

    :param other: the policy of the simulated world, where it is to have another one.
    """
    happened: Counter[str] = Counter()
    timeline = Timeline(arrivals_of(seed, HOSTS, overcommitment=1.7))
    #: Where each VM is that runs.
    places: dict[str, str] = {}
    before: dict[str, dict[str, Size]] = {}
    simulated = SimulatedWorld(HOSTS, other or policy)
    # An answer must not wait for a compiler.
    simulated.warm_up()
    async with live_world(HOSTS, policy) as live:
        for number, event in enumerate(timeline):
            if number == events:
                break
            if isinstance(event, Arrival):
                decided, also = await live.arrive(event), simulated.arrive(event)
                assert decided == also, f"event {number}: {event}"
                happened["placed" if decided.host else "refused"] += 1
                for name in decided.victims:
                    happened["preempted"] += 1
                    assert places.pop(name) == decided.host
                    timeline.stopped(name)
                host = decided.host
                if host is not None:
                    places[event.name] = host
                    timeline.runs(event)
            else:
                at_s, name = event
                host = places.pop(name)
                await live.depart(name)
                simulated.depart_until(at_s)
                happened["departed"] += 1
            # A refusal may have changed sizes anywhere for a moment, and has to have left none behind.
            everywhere = number % WHOLE_LOOK == 0 or host is None
            for each in live.agents if everywhere else [host]:
                assert each is not None
                sizes = live.sizes(each)
                assert sizes == simulated.sizes(each), f"event {number}: {event}, {each}"
                happened.update(_moves(before.get(each, {}), sizes))
                before[each] = sizes
    assert happened["placed"] + happened["refused"] + happened["departed"] == events
    assert set(places) == {name for sizes in before.values() for name in sizes}
    for kind in ("placed", "refused", "departed", "preempted", "deflated", "reinflated"):
        assert happened[kind] > 0, f"no VM was {kind}: {happened}"


def _moves(before: dict[str, Size], after: dict[str, Size]) -> Counter[str]:
    """How many VMs became smaller and larger."""
    moves: Counter[str] = Counter()
    for name in before.keys() & after.keys():
        moves["deflated"] += any(new < old for new, old in zip(after[name], before[name], strict=True))
        moves["reinflated"] += any(new > old for new, old in zip(after[name], before[name], strict=True))
    return moves

"""Our own limits on a real tap, in a network namespace that the test makes."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from hostagent.errors import TrafficControlError
from hostagent.limits.tc import Shape, Tap, TrafficControl, run

pytestmark = pytest.mark.service
MIB = 1 << 20


def command(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30).stdout


@pytest.fixture
def tap() -> Iterator[Tap]:
    tap = Tap(f"ebbt{secrets.token_hex(4)}", f"ebbtide-test-{secrets.token_hex(4)}")
    assert tap.namespace is not None
    command("ip", "netns", "add", tap.namespace)
    try:
        command(*tap.ip("tuntap", "add", "dev", tap.name, "mode", "tap", "vnet_hdr"))
        command(*tap.ip("link", "set", tap.name, "up"))
        yield tap
    finally:
        command("ip", "netns", "del", tap.namespace)


def devices(tap: Tap) -> set[str]:
    return {line.split(":")[1].strip() for line in command(*tap.ip("-o", "link", "show")).splitlines()}


async def test_a_limit_is_set_changed_and_lifted_on_a_tap_that_is_found_in_its_namespace(tap: Tap) -> None:
    tc = TrafficControl()
    assert await tc.find(tap.name) == tap
    assert await tc.look(tap) == Shape()
    for rate in (8 * MIB, MIB, 3 << 30):
        await tc.limit(tap, rate)
        shape = await tc.look(tap)
        assert (shape.to_guest, shape.from_guest, shape.ours) == (rate, rate, True)
    assert devices(tap) == {"lo", tap.name, tap.ifb}
    await tc.lift(tap)
    assert await tc.look(tap) == Shape()
    assert devices(tap) == {"lo", tap.name}


async def test_words_on_filters_say_the_same_as_their_json(tap: Tap) -> None:
    """Before iproute2 5.18 there are only the words."""

    asked: list[Sequence[str]] = []

    async def as_old(argv: Sequence[str], text: str = "") -> str:
        asked.append(argv)
        said = await run(argv, text)
        if "filter show" not in text:
            return said
        _, end = json.JSONDecoder().raw_decode(said)
        return said[:end] + said[end:].replace('"options":{', '"options": {fh 800: ht divisor 1 ')

    tc, old = TrafficControl(), TrafficControl(as_old)
    await tc.limit(tap, 8 * MIB)
    assert await old.look(tap) == await tc.look(tap)
    assert "filter" in asked[-1]
    await old.lift(tap)
    assert devices(tap) == {"lo", tap.name}


async def test_a_qdisc_of_somebody_else_is_seen_and_left_alone(tap: Tap) -> None:
    # As libvirt leaves it where the kernel has no SFQ.
    command(*tap.tc("qdisc", "add", "dev", tap.name, "root", "handle", "1:", "htb", "default", "1"))
    command(*tap.tc("class", "add", "dev", tap.name, "parent", "1:", "classid", "1:1", "htb", "rate", "8389kbps"))
    tc = TrafficControl()
    shape = await tc.look(tap)
    assert shape.root == ("htb", "1:")
    assert shape.to_guest == pytest.approx(8 * MIB, rel=0.001)
    assert shape.from_guest is None
    assert shape.half_made
    with pytest.raises(TrafficControlError, match="another program"):
        await tc.limit(tap, MIB)
    assert await tc.look(tap) == shape
    command(*tap.tc("qdisc", "add", "dev", tap.name, "parent", "1:1", "handle", "2:", "pfifo"))
    assert not (await tc.look(tap)).half_made
    await tc.clear(tap)
    await tc.limit(tap, MIB)
    assert (await tc.look(tap)).rate == MIB


async def test_what_is_left_of_a_tap_that_is_gone_is_removed(tap: Tap) -> None:
    tc = TrafficControl()
    await tc.limit(await tc.find(tap.name), MIB)
    command(*tap.ip("link", "del", tap.name))
    assert tap.ifb in devices(tap)
    await tc.forget(tap.name)
    assert devices(tap) == {"lo"}


async def test_a_tap_that_is_not_there_is_an_error_that_names_it(tap: Tap) -> None:
    with pytest.raises(TrafficControlError, match="nosuchtap"):
        await TrafficControl().limit(Tap("nosuchtap", tap.namespace), MIB)
    assert devices(tap) == {"lo", tap.name}

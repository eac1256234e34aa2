"""Framing, rate limit and writes of the guest's port."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guestagent import agent
from guestagent.channel import LINE_BYTES, Channel, LineReader, PortNotFound, RateLimit, find_port
from tests.guestagent.harness import bench


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ends(tmp_path: Path, clock: Clock) -> Iterator[tuple[Channel, socket.socket]]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "port"))
        listener.listen()
        channel = Channel(str(tmp_path / "port"), clock)
        peer, _ = listener.accept()
        peer.settimeout(5)
        with peer:
            yield channel, peer
            channel.close()


def read_some(peer: socket.socket) -> bytes:
    peer.setblocking(False)
    data = b""
    try:
        while chunk := peer.recv(1 << 20):
            data += chunk
    except BlockingIOError:
        pass
    return data


lines = st.lists(st.binary(min_size=1, max_size=40).filter(lambda line: b"\n" not in line and line.strip() == line))


@given(lines, st.data())
def test_lines_come_out_as_they_went_in_however_they_are_cut(sent: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in sent)
    reader, got = LineReader(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        got += reader.feed(stream[:size])
        stream = stream[size:]
    assert got == sent


@given(st.binary(max_size=300), st.lists(st.integers(1, 50), min_size=1))
def test_any_bytes_leave_the_next_line_whole_after_a_newline(garbage: bytes, cuts: list[int]) -> None:
    reader, got = LineReader(limit=64), []
    stream = garbage + b"\n" + b'{"id":1}' + b"\n"
    while stream:
        got += reader.feed(stream[: cuts[0]])
        stream, cuts = stream[cuts[0] :], [*cuts[1:], cuts[0]]
    assert got[-1] == b'{"id":1}'
    assert all(line is None or len(line) < 64 for line in got)


def test_a_line_that_is_too_long_is_told_once_and_skipped_to_its_end() -> None:
    reader = LineReader()
    assert reader.feed(b"x" * LINE_BYTES) == [None]
    assert reader.feed(b"x" * LINE_BYTES * 3) == []
    assert reader.feed(b"tail\nshort\n") == [b"short"]


def test_the_longest_line_is_taken_and_one_byte_more_is_not() -> None:
    longest = b"x" * (LINE_BYTES - 1)
    assert LineReader().feed(longest + b"\n") == [longest]
    assert LineReader().feed(longest + b"x\n") == [None]


def test_a_reader_keeps_no_more_than_a_line() -> None:
    reader = LineReader()
    for _ in range(100):
        reader.feed(b"y" * 50000)
    assert len(reader._buffer) < LINE_BYTES


@given(st.lists(st.floats(0, 3), min_size=1, max_size=100))
def test_no_window_of_a_second_ever_holds_more_than_the_limit(waits: list[float]) -> None:
    clock = Clock()
    limit, sent = RateLimit(5, 1.0, clock), []
    for wait in waits:
        clock.now += wait
        clock.now += limit.delay_s()
        limit.count()
        sent.append(clock.now)
    assert all(later - first >= 1.0 - 1e-6 for first, later in zip(sent, sent[5:], strict=False))


def test_a_twenty_first_message_waits_for_the_second_to_end(ends: tuple[Channel, socket.socket], clock: Clock) -> None:
    channel, peer = ends
    for i in range(30):
        assert channel.queue(b"%d" % i)
    channel.flush()
    assert read_some(peer).split() == [b"%d" % i for i in range(20)]
    clock.now += 0.75
    channel.flush()
    assert read_some(peer) == b""
    assert channel.wait_s() == pytest.approx(0.25)
    clock.now += 0.25
    channel.flush()
    assert read_some(peer).split() == [b"%d" % i for i in range(20, 30)]


def test_a_host_that_does_not_read_blocks_nothing_and_costs_only_its_own_lines(
    ends: tuple[Channel, socket.socket], clock: Clock
) -> None:
    channel, peer = ends
    long = b"a" * 60000
    while channel.queue(long):
        pass
    channel.flush()  # returns with a line torn in the middle, because the socket is full
    clock.now += 6
    channel.flush()
    assert channel.wait_s() is None
    read_some(peer)
    assert channel.queue(b"after")
    clock.now += 1
    channel.flush()
    assert read_some(peer).endswith(b"\nafter\n")


def test_what_was_not_sent_is_forgotten_on_demand(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    channel.queue(b"old")
    channel.forget()
    channel.queue(b"new")
    channel.flush()
    assert read_some(peer) == b"new\n"


def test_a_closed_host_is_told_apart_from_a_silent_one(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    assert channel.lines() == []
    peer.close()
    assert channel.lines() is None


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_port_that_is_unplugged_is_looked_for_again_and_served_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    opened: list[int] = []
    gone: set[int] = set()
    usual = getattr(os, call)

    class Port(Channel):
        """Counts as a device, whose descriptor stays while hosts come and go."""

        def __init__(self, path: str) -> None:
            if gone:
                raise PortNotFound("it is unplugged")
            super().__init__(path)
            self.is_socket = False
            opened.append(self.fileno())

    def of_kernel(fd: int, given: Any) -> Any:
        if fd in gone:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return usual(fd, given)

    monkeypatch.setattr(agent, "Channel", Port)
    monkeypatch.setattr(os, call, of_kernel)
    with bench(tmp_path) as guest:
        host = guest.host()
        host.hello()
        gone.add(opened[0])
        host.ask("status")
        end = time.monotonic() + 10
        while guest.agent._sentence() != "its host has not said hello":
            assert time.monotonic() < end, "the agent takes its host for connected"
            time.sleep(0.02)
        gone.clear()
        assert guest.host().hello()["nonce"] == "n1"


def test_a_port_is_found_by_name_without_udev(tmp_path: Path) -> None:
    for device, name in (("vport1p1", "org.qemu.guest_agent.0"), ("vport1p2", "io.ebbtide.guest.0")):
        directory = tmp_path / "class/virtio-ports" / device
        directory.mkdir(parents=True)
        (directory / "name").write_text(name + "\n")
    assert find_port("io.ebbtide.guest.0", str(tmp_path)) == "/dev/vport1p2"
    with pytest.raises(PortNotFound, match="absent"):
        find_port("absent", str(tmp_path))
    with pytest.raises(PortNotFound, match="does not exist"):
        find_port(str(tmp_path / "nowhere"), str(tmp_path))
    with pytest.raises(PortNotFound, match="virtio_console"):
        find_port("io.ebbtide.guest.0", str(tmp_path / "empty"))

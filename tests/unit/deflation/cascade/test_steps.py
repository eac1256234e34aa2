from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.bounds import Bound
from ebbtide.deflation.cascade.instructions import GuestReading
from ebbtide.deflation.cascade.reinflation import cpus_to_plug
from ebbtide.deflation.cascade.steps import balloon_to_keep, cpus_to_keep, dimms_to_plug, dimms_to_take, memory_to_keep

FULL = Bound(4, None, 512, 512)


@pytest.mark.parametrize(
    ("bound", "online", "unpluggable", "target", "kept"),
    [
        (FULL, (0, 1, 2, 3), (3, 2, 1), 4, None),
        (FULL, (0, 1, 2, 3), (3, 2, 1), 3.01, None),
        (FULL, (0, 1, 2, 3), (3, 2, 1), 3, (0, 1, 2)),
        (FULL, (0, 1, 2, 3), (3, 2, 1), 2.5, (0, 1, 2)),
        (FULL, (0, 1, 2, 3), (3, 2, 1), 0.1, (0,)),
        # In the guest's order, and not what is busy.
        (FULL, (0, 1, 2, 3), (1, 3), 2, (0, 2)),
        (FULL, (0, 1, 2, 3), (2,), 1, (0, 1, 3)),
        (FULL, (0, 1, 2, 3), (), 1, None),
        # CPU 0 stays, whatever the guest says; so does one that is off line already.
        (FULL, (0, 1), (0, 7, 1), 1, (0,)),
        # A quota below the target: nothing has to be taken off.
        (Bound(4, 0.25, 512, 512), (0, 1, 2, 3), (3, 2, 1), 1, None),
        # A list with repetitions does not make more CPUs of it.
        (Bound(2, None, 512, 512), (0, 1, 1, 1), (1,), 2, None),
        (Bound(2, None, 512, 512), (0, 1, 1, 1), (1,), 1.5, None),
    ],
)
def test_which_cpus_stay_on_line(
    bound: Bound, online: tuple[int, ...], unpluggable: tuple[int, ...], target: float, kept: tuple[int, ...] | None
) -> None:
    assert cpus_to_keep(bound, GuestReading(online, unpluggable, 0), target) == kept


@pytest.mark.parametrize(
    ("need", "spare", "block", "kept"),
    [
        (100, 1000, 2, 412),
        (101, 1000, 2, 412),
        (100, 100, 2, 462),
        (100, 7.9, 2, None),
        (100, 8, 2, 508),
        (3.9, 1000, 2, None),
        (1000, 10_000, 2, 0),
        (100, 1000, 128, None),
        (200, 1000, 128, 384),
        (100, 1000, 0, None),
        (100, 0, 2, None),
        (100, -50, 2, None),
    ],
)
def test_how_much_plugged_memory_stays(need: float, spare: float, block: float, kept: float | None) -> None:
    assert memory_to_keep(FULL, GuestReading((0,), (), spare), need, block) == kept


WITH_DIMMS = Bound(4, None, 512, 612, dimms_mib=(256.0, 256.0))


@pytest.mark.parametrize(
    ("need", "spare", "block", "dimms", "kept"),
    [
        # virtio-mem comes first, for as long as a step of it is worth while.
        (300, 1000, 2, True, 512),
        (50, 1000, 2, True, 562),
        # Without virtio-mem, a whole DIMM: never more than is needed, nor than half of what the guest can spare.
        (300, 1000, 0, True, 356),
        (256, 512, 0, True, 356),
        (255, 1000, 0, True, None),
        (300, 511, 0, True, None),
        (300, 1000, 0, False, None),
        (600, 1000, 2, False, 512),
    ],
)
def test_a_step_is_virtio_mem_first_and_then_a_whole_dimm(
    need: float, spare: float, block: float, dimms: bool, kept: float | None
) -> None:
    assert memory_to_keep(WITH_DIMMS, GuestReading((0,), (), spare), need, block, dimms) == kept


def test_a_dimm_that_could_not_be_given_back_counts_neither_as_virtio_mem_nor_as_one_to_take() -> None:
    bound = Bound(4, None, 512, 612, dimms_mib=(256.0,), fixed_mib=256.0)
    asked = [memory_to_keep(bound, GuestReading((0,), (), 2000), need, 2.0) for need in (50, 600)]
    assert asked == [562, 512]
    rest = replace(bound, plugged_mib=256.0, dimms_mib=())
    assert memory_to_keep(rest, GuestReading((0,), (), 2000), 600, 2.0) is None


@pytest.mark.parametrize(
    ("dimms", "virtio", "take", "block", "taken"),
    [
        ((256, 256), 100, 100, 2, ()),
        ((256, 256), 100, 156, 2, ()),
        ((256, 256), 4, 256, 2, (256,)),
        ((256, 256), 0, 600, 2, (256, 256)),
        ((128, 512, 256), 0, 400, 2, (256, 128)),
        ((128,), 100, 200, 2, (128,)),
        ((), 100, 200, 2, ()),
        # A DIMM that frees no more than the blocks alone stays.
        ((64,), 512, 101, 2, ()),
        ((256,), 512, 300, 128, ()),
        # Blocks too large for what is to be taken give nothing.
        ((256,), 512, 256, 512, (256,)),
        ((256, 256), 512, 768, 512, (256,)),
        # Nor does a device that cannot be used.
        ((256,), 512, 256, 0, (256,)),
    ],
)
def test_which_dimms_are_taken(
    dimms: tuple[float, ...], virtio: float, take: float, block: float, taken: tuple[float, ...]
) -> None:
    assert dimms_to_take(dimms, virtio, take, block) == taken


@given(
    dimms=st.lists(st.integers(1, 8).map(lambda count: count * 128.0), max_size=4),
    blocks=st.integers(0, 8),
    block=st.sampled_from([2.0, 128.0, 256.0, 512.0, 1024.0]),
    need=st.floats(0, 4096),
    spare=st.floats(0, 8192),
)
def test_what_a_step_of_plugged_memory_promises_blocks_and_whole_dimms_come_to(
    dimms: list[float], blocks: int, block: float, need: float, spare: float
) -> None:
    virtio = blocks * block
    bound = Bound(4, None, 512, virtio + sum(dimms), dimms_mib=tuple(dimms))
    kept = memory_to_keep(bound, GuestReading((0,), (), spare), need, block)
    if kept is None:
        return
    step = bound.plugged_mib - kept
    taken = sum(dimms_to_take(dimms, virtio, step, block))
    assert taken + min((step - taken) // block * block, virtio) == step


@pytest.mark.parametrize(
    ("missing", "grow", "given"), [((256, 128), 300, (256,)), ((256, 128), 384, (256, 128)), ((256,), 255, ())]
)
def test_which_dimms_are_plugged_again(missing: tuple[float, ...], grow: float, given: tuple[float, ...]) -> None:
    assert dimms_to_plug(missing, grow) == given


@given(st.lists(st.integers(1, 1024).map(float)), st.integers(0, 1024), st.integers(0, 4096))
def test_dimms_never_take_or_give_more_than_is_asked(dimms: list[float], virtio: float, amount: float) -> None:
    for chosen in (dimms_to_take(dimms, virtio, amount, 2.0), dimms_to_plug(dimms, amount)):
        assert sum(chosen) <= amount
        assert not Counter(chosen) - Counter(dimms)


@pytest.mark.parametrize(
    ("need", "spare", "kept"),
    [(100, 1000, 412), (100, 101, 462), (100, 7, None), (2.5, 1000, 509.5), (2.5, 5, None), (500, 1e9, 192)],
)
def test_how_much_boot_memory_stays(need: float, spare: float, kept: float | None) -> None:
    assert balloon_to_keep(FULL, GuestReading((0,), (), spare), need) == kept


def test_a_balloon_at_the_floor_is_left_there() -> None:
    assert balloon_to_keep(Bound(1, None, 192, 512), GuestReading((0,), (), 1000), 100) is None
    assert balloon_to_keep(Bound(1, None, 100, 512), GuestReading((0,), (), 1000), 100) is None


@pytest.mark.parametrize(
    ("online", "count", "plugged"),
    [((0,), 3, (0, 1, 2)), ((0, 3), 3, (0, 1, 3)), ((0, 1, 2), 2, (0, 1, 2)), ((0, 2), 2, (0, 2))],
)
def test_plugging_takes_no_cpu_off(online: tuple[int, ...], count: int, plugged: tuple[int, ...]) -> None:
    assert cpus_to_plug(GuestReading(online, (), 0), count) == plugged

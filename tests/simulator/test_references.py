"""Tuples by reference, and functions that are compiled into others only."""

from __future__ import annotations

from collections import namedtuple
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ebbtide.simulator.compiling import _part_options, compiled, plain
from ebbtide.simulator.parts import part_compiler
from ebbtide.simulator.references import by_reference


class Inner(NamedTuple):
    counts: Any
    sums: Any


class Outer(NamedTuple):
    table: Any
    inner: Inner
    more: Any


def fresh() -> Outer:
    return Outer(np.arange(12).reshape(4, 3), Inner(np.arange(4), np.full(4, 0.5)), np.zeros(4))


def add_row(s: Any, row: int) -> float:
    s.table[row, 1] += s.inner.counts[row]
    s.more[row] = double(s.inner, row)
    below = s.table[row]
    below[2] = s.more[-1] + s.table[:, 1][row] + s.more[1:3].sum()
    return float(s.more[row])


def double(inner: Any, row: int) -> float:
    inner.sums[row] *= 2.0
    return float(inner.sums[row] + len(inner.sums))


def added(s: Outer, rows: int) -> float:
    total = 0.0
    held = by_reference(s)
    for row in range(rows):
        total += add_row(held, row)
    return total


@pytest.mark.parametrize("counted", [False, True], ids=["without references counted", "with them"])
def test_what_goes_by_reference_is_read_and_written_as_the_tuple_itself(counted: bool) -> None:
    loop: Any = compiled(added, _nrt=counted)
    ours, others = fresh(), fresh()
    assert loop(ours, 4) == plain(loop)(others, 4) == 20.0
    for one, other in zip(
        (ours.table, *ours.inner, ours.more), (others.table, *others.inner, others.more), strict=True
    ):
        np.testing.assert_array_equal(one, other)


LAST = -1


def last_of(s: Any, other: Any, row: int) -> float:
    either = s.more if row > 1 else other
    s.table[row, -1] = s.table[-1, 1] + s.inner.counts[-1] + s.table[1:, 0][row - 1]
    return float(s.table[row, LAST] + s.table[LAST, row] + s.more[LAST] + s.more[1:][LAST] + either[row - 3])


def from_their_ends(s: Outer, other: Any) -> float:
    held = by_reference(s)
    return last_of(held, other, 1) + last_of(held, other, 2)


def at_row(s: Any, row: int) -> float:
    return float(s.more[row] + s.table[row, row])


def at_a_row(s: Outer, row: int) -> float:
    return at_row(by_reference(s), row)


def within(values: Any) -> Any:
    """An array that has sevens before and behind it."""
    room = np.full(3 * values.size, 7, values.dtype)
    room[values.size : -values.size] = values.ravel()
    return room[values.size : -values.size].reshape(values.shape)


@pytest.mark.parametrize(("module", "below_0"), [("ebbtide.tests", 14.0), ("others.tests", 13.0)])
def test_a_constant_index_counts_from_the_end_of_any_array_and_one_that_is_worked_out_of_others_arrays_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, below_0: float
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make: Any = namedtuple
    inner, outer = (make(kind.__name__, kind._fields, module=module) for kind in (Inner, Outer))

    def made() -> Any:
        held = inner(within(np.arange(4)), np.zeros(4))
        return outer(within(np.arange(12).reshape(4, 3)), held, within(np.arange(4.0) / 2))

    ours, others = made(), made()
    other = np.arange(5.0, 9.0)
    loop: Any = compiled(from_their_ends)
    assert loop(ours, other) == plain(loop)(others, other)
    np.testing.assert_array_equal(ours.table, others.table)
    ours.table[-1, -1], ours.more[-1] = 11, 2.0
    assert compiled(at_a_row)(ours, -1) == below_0


def rows_of(s: Outer) -> int:
    return len(by_reference(s).nothing)  # type: ignore[attr-defined]


def test_a_field_that_is_not_there_is_an_error() -> None:
    with pytest.raises(Exception, match="nothing"):
        compiled(rows_of)(fresh())


def test_a_numba_that_is_made_otherwise_compiles_as_it_always_does(monkeypatch: pytest.MonkeyPatch) -> None:
    codegen: Any = import_module("numba.core.codegen")
    assert issubclass(part_compiler.__wrapped__(), import_module("numba.core.compiler").Compiler)
    monkeypatch.delattr(codegen.CPUCodeLibrary, "_finalize_dynamic_globals")
    assert part_compiler.__wrapped__() is None
    monkeypatch.setattr("ebbtide.simulator.parts.part_compiler", lambda: None)
    assert _part_options.__wrapped__() == {"no_cfunc_wrapper": True}

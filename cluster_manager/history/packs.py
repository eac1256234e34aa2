"""Packs of steps: the figures of one host and its VMs over some steps in a row, folded into coarser ones. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.messages.history import HostColumns

#: What is kept of a host, and of each of its VMs where it is not the host's alone.
COLUMNS: Final = tuple(name for name in HostColumns.model_fields if name != "known_s")
AT: Final[Mapping[str, int]] = {name: number for number, name in enumerate(COLUMNS)}
#: Behind the columns: for how many seconds of the step there were figures at all.
SEEN: Final = len(COLUMNS)
WIDTH: Final = SEEN + 1
#: Of which the largest counts; of the others the mean.
MAXIMA: Final = tuple(number for name, number in AT.items() if name.endswith("_max_percent"))
#: The host itself, in the place of a VM's name.
HOST: Final = ""

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pack:
    """Some steps in a row.

    :param start: where the first step begins, whole seconds since the epoch, a multiple of ``step_s``.
    :param names: whose rows these are: the host's first (`HOST`), then its VMs'.
    :param values: shape (steps, names, WIDTH); NaN where a figure was not known.
    """

    start: int
    step_s: int
    names: tuple[str, ...]
    values: Rows

    @property
    def end(self) -> int:
        return self.start + self.step_s * len(self.values)

    @property
    def known(self) -> bool:
        """Whether there are figures in it."""
        return bool((self.values[..., SEEN] > 0).any())

    def within(self, begin: int, end: int) -> Pack:
        """The steps that begin within a time."""
        first = max(-(-(begin - self.start) // self.step_s), 0)
        last = max(-(-(end - self.start) // self.step_s), first)
        return Pack(self.start + first * self.step_s, self.step_s, self.names, self.values[first:last])

    def only(self, name: str) -> Pack | None:
        """The rows of one; None where it has none."""
        if name not in self.names:
            return None
        at = self.names.index(name)
        return Pack(self.start, self.step_s, (name,), self.values[:, at : at + 1])


def encoded(pack: Pack) -> bytes:
    """A pack as it is stored. Steps of a figure stand beside each other, byte by byte: most of them are equal."""
    head = json.dumps({"names": pack.names, "steps": len(pack.values)}, separators=(",", ":")).encode()
    planes = np.ascontiguousarray(pack.values.transpose(2, 1, 0), dtype="<f4").view(np.uint8).reshape(-1, 4).T
    return zlib.compress(len(head).to_bytes(4, "little") + head + planes.tobytes(), 6)


def decoded(start: int, step_s: int, body: bytes) -> Pack:
    """:raises ValueError: it is no pack."""
    try:
        raw = zlib.decompress(body)
        end = 4 + int.from_bytes(raw[:4], "little")
        head: dict[str, Any] = json.loads(raw[4:end])
        names = tuple(head["names"])
        planes = np.frombuffer(raw, np.uint8, offset=end).reshape(4, -1)
        figures = np.ascontiguousarray(planes.T).view("<f4").reshape(WIDTH, len(names), head["steps"])
    except (zlib.error, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a pack of the history is damaged: {error}") from error
    return Pack(start, step_s, names, figures.transpose(2, 1, 0))


def folded(packs: Iterable[Pack], names: Sequence[str], start: int, step_s: int, steps: int) -> Pack:
    """What packs say of some names, in steps of another length.

    A mean is over the time for which the figure was known, so that it is the same whether it was folded once or in
    between, as long as all figures of a row are known or none; it is never beyond what went into it. A step of which
    nothing is known is NaN.

    :param step_s: a multiple of the packs' own, and ``start`` of it.
    """
    at = {name: number for number, name in enumerate(names)}
    shape = (steps, len(names), WIDTH)
    sums, weights = np.zeros(shape), np.zeros(shape)
    largest = np.full((*shape[:2], len(MAXIMA)), np.nan, dtype=np.float32)
    for pack in packs:
        theirs = [number for number, name in enumerate(pack.names) if name in at]
        if not theirs:
            continue
        ours = [at[pack.names[number]] for number in theirs]
        bins = (pack.start - start + pack.step_s * np.arange(len(pack.values))) // step_s
        for number in np.flatnonzero((bins >= 0) & (bins < steps)):
            into, values = bins[number], pack.values[number, theirs].astype(np.float64)
            weight = np.where(np.isfinite(values), values[:, SEEN:], 0.0)
            sums[into, ours] += np.nan_to_num(values) * weight
            weights[into, ours] += weight
            largest[into, ours] = np.fmax(largest[into, ours], pack.values[number, theirs][:, MAXIMA])
    with np.errstate(invalid="ignore"):
        means = (sums / weights).astype(np.float32)
    means[..., MAXIMA] = largest
    means[..., SEEN] = weights[..., SEEN]
    return Pack(start, step_s, tuple(names), means)


def fuller(one: Pack, other: Pack) -> Pack:
    """Of two packs of the same steps and names, each step and name as it is known for longer; else the first one's."""
    longer = other.values[..., SEEN:] > one.values[..., SEEN:]
    return Pack(one.start, one.step_s, one.names, np.where(longer, other.values, one.values))


def joined(packs: Iterable[Pack]) -> list[Pack]:
    """Packs of the same step and names that follow each other, as one each."""
    done: list[list[Pack]] = []
    for pack in packs:
        last = done[-1][-1] if done else None
        if last is not None and (last.end, last.step_s, last.names) == (pack.start, pack.step_s, pack.names):
            done[-1].append(pack)
        else:
            done.append([pack])
    return [
        run[0]
        if len(run) == 1
        else Pack(run[0].start, run[0].step_s, run[0].names, np.concatenate([p.values for p in run]))
        for run in done
    ]

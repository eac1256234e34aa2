"""Rows in the order of their times: a bounded buffer for files that are nearly in order, runs on disk for others."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Final

import numpy as np

from ebbtide.simulator.errors import TraceError
from ebbtide.simulator.inputs.batches import Batch, Floats
from ebbtide.simulator.inputs.report import Report
from ebbtide.simulator.inputs.tables import Rows

#: Rows that a buffer holds back.
BUFFER_ROWS: Final = 131_072
#: Rows (of jobs: tasks) of one sorted run.
RUN_ROWS: Final = 524_288
#: Rows (of jobs: tasks) of a batch that is given on.
BATCH_ROWS: Final = 65_536


def buffered(rows: Iterable[Rows], report: Report, buffer_rows: int = BUFFER_ROWS) -> Iterator[Batch]:
    """Put rows right that come at most ``buffer_rows`` rows too late; equal times keep the file's order.

    :raises TraceError: one comes later still; it names the line.
    """
    held: list[Rows] = []
    count = 0
    given_until_s = -np.inf
    newest_s = -np.inf
    for part in rows:
        keys = part.batch.keys
        report.reordered += int((keys < np.maximum.accumulate(np.append(newest_s, keys[:-1]))).sum())
        newest_s = max(newest_s, float(keys.max()))
        late = keys < given_until_s
        if late.any():
            i = int(np.argmax(late))
            raise TraceError(
                report.file,
                f"is {keys[i]:.12g}, but more than {buffer_rows} rows before it there is {given_until_s:.12g}: "
                "the file is out of order, read it with the order 'sort'",
                line=int(part.lines[i]),
                field=part.batch.KEY,
                place=report.place,
            )
        held.append(part)
        count += len(keys)
        if count >= 2 * buffer_rows:
            everything = _sorted([p.batch for p in held])
            # The lines of what is held back matter only to name one; those of sorted rows are not kept.
            batch, rest = everything.take(slice(0, count - buffer_rows)), everything.take(slice(-buffer_rows, None))
            given_until_s = float(batch.keys[-1])
            held = [Rows(rest, np.zeros(len(rest), np.int64))]
            count = len(rest)
            yield from batch.portions(BATCH_ROWS)
    if held:
        yield from _sorted([p.batch for p in held]).portions(BATCH_ROWS)


def sort(rows: Iterable[Rows], report: Report, run_rows: int = RUN_ROWS) -> Iterator[Batch]:
    """Sort any number of rows in bounded memory: sorted runs in temporary files, merged batch by batch."""
    runs: list[IO[bytes]] = []
    held: list[Batch] = []
    count = 0
    newest_s = -np.inf
    try:
        for part in rows:
            keys = part.batch.keys
            report.reordered += int((keys < np.maximum.accumulate(np.append(newest_s, keys[:-1]))).sum())
            newest_s = max(newest_s, float(keys.max()))
            held.append(part.batch)
            count += part.batch.weight
            if count >= run_rows:
                runs.append(_spilled(_sorted(held), report))
                held, count = [], 0
        last = _sorted(held) if held else None
        if not runs:
            if last is not None:
                yield from last.portions(BATCH_ROWS)
            return
        if last is not None:
            runs.append(_spilled(last, report))
        yield from _merged(runs)
    finally:
        for run in runs:
            run.close()


def _sorted(batches: Sequence[Batch]) -> Batch:
    batch = type(batches[0]).joined(batches)
    keys = batch.keys
    if (keys[1:] >= keys[:-1]).all():
        return batch
    return batch.take(np.argsort(keys, kind="stable"))


def _spilled(batch: Batch, report: Report) -> IO[bytes]:
    try:
        run = tempfile.TemporaryFile(prefix="ebbtide-run-")  # noqa: SIM115  # closed when it is merged
        for portion in batch.portions(BATCH_ROWS):
            pickle.dump(portion, run, protocol=pickle.HIGHEST_PROTOCOL)
        run.seek(0)
    except OSError as error:
        raise TraceError(report.file, f"cannot be sorted over temporary files: {error}") from error
    return run


def _merged(runs: Sequence[IO[bytes]]) -> Iterator[Batch]:
    """Merge sorted runs: all rows up to the earliest end of a run's batch in hand are complete."""
    hands: list[Batch | None] = [_next(run) for run in runs]
    while any(hand is not None for hand in hands):
        ends: Floats = np.array([hand.keys[-1] if hand is not None else np.inf for hand in hands])
        until_s = float(ends.min())
        ready: list[Batch] = []
        for i, hand in enumerate(hands):
            while hand is not None:
                # Rows at `until_s` of a later run wait for those of an earlier one, which may go on in its next batch.
                cut = int(np.searchsorted(hand.keys, until_s, side="right"))
                ready.append(hand.take(slice(0, cut)))
                hand = hand.take(slice(cut, None)) if cut < len(hand) else _next(runs[i])
                hands[i] = hand
                if hand is None or hand.keys[0] > until_s:
                    break
        yield from _sorted([r for r in ready if len(r)]).portions(BATCH_ROWS)


def _next(run: IO[bytes]) -> Batch | None:
    try:
        batch: Any = pickle.load(run)  # our own file, unlinked since it was made
    except EOFError:
        return None
    assert isinstance(batch, Batch)
    return batch

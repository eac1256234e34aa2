"""A trace: a file read as batches in the order of their times, with the report of what was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs import documents, ordering, parquet, reading, sources
from ebbtide.simulator.inputs.batches import Batch
from ebbtide.simulator.inputs.formats.registry import AnyFormat
from ebbtide.simulator.inputs.recognise import named, recognise
from ebbtide.simulator.inputs.report import MAX_MALFORMED, Report
from ebbtide.simulator.inputs.tables import BUFFER, SORT, Format, Rows, checked_options


class Trace:
    """A file of a format. Iterate for batches; each iteration reads the file again and makes a new `report`.

    Memory is bounded by the buffer or the run of a sort, not by the trace's length.

    :param path: the file; gzip and zstd are recognised.
    :param format_name: its format; None: by its content.
    :param options: of the format (docs/reference/traces.md).
    :param order: ``buffer`` puts rows right that come up to ``buffer_rows`` rows too late, ``sort`` any (over
        temporary files); None: what the public files of the format need.
    :param max_malformed: the share of malformed lines above which reading fails.
    :param from_first: times count from the first row; what calendar times do anyway.
    :param fast: let pyarrow read what is plain; nothing but the time it takes depends on it.
    :param progress: called with what has been read and what there is.
    :raises TraceError: the file cannot be opened, or its format is not recognised.
    :raises InvalidParameter: an option that the format does not have, or a bad value.
    """

    def __init__(
        self,
        path: Path,
        format_name: str | None = None,
        *,
        options: Mapping[str, float | str] | None = None,
        order: str | None = None,
        buffer_rows: int = ordering.BUFFER_ROWS,
        run_rows: int = ordering.RUN_ROWS,
        max_malformed: float = MAX_MALFORMED,
        from_first: bool = False,
        fast: bool = True,
        progress: sources.Progress | None = None,
    ) -> None:
        self.path = path
        self.form: AnyFormat = recognise(path) if format_name is None else named(format_name)
        self.options = checked_options(self.form.name, self.form.defaults, options or {})
        self.order = self.form.order if order is None else order
        if self.order not in (BUFFER, SORT):
            raise InvalidParameter("order", f"must be {BUFFER} or {SORT}, not {self.order!r}")
        for name, value in (("buffer_rows", buffer_rows), ("run_rows", run_rows)):
            if value < 1:
                raise InvalidParameter(name, f"must be at least 1, not {value}")
        self._buffer_rows = buffer_rows
        self._run_rows = run_rows
        self._max_malformed = max_malformed
        self._from_first = from_first
        self._fast = fast
        self._progress = progress
        self.report = self._new_report()

    @property
    def kind(self) -> str:
        """The kind of its rows, a key of `batches.KINDS`."""
        return self.form.kind

    def __iter__(self) -> Iterator[Batch]:
        """:raises TraceError: the file is broken, out of order beyond the buffer, or too much of it is malformed."""
        self.report = report = self._new_report()
        rows = self._rows(report)
        if isinstance(self.form, Format) and self.form.pairs is not None:
            rows = self.form.pairs(self._in_order(rows, report), self.options, report)
        batches = self._in_order(rows, report)
        start_s: float | None = None
        for batch in batches:
            if start_s is None:
                start_s = self._start_s(batch, report)
            report.given += len(batch)
            yield batch.shifted(-start_s) if start_s else batch

    def _in_order(self, rows: Iterator[Rows], report: Report) -> Iterator[Batch]:
        if self.order == SORT:
            return ordering.sort(rows, report, self._run_rows)
        return ordering.buffered(rows, report, self._buffer_rows)

    def _start_s(self, batch: Batch, report: Report) -> float:
        first_s = float(batch.keys[0])
        if self.form.calendar:
            report.origin = datetime.fromtimestamp(first_s, UTC).isoformat()
            return first_s
        return first_s if self._from_first else 0.0

    def _rows(self, report: Report) -> Iterator[Rows]:
        """All rows; at their end, before any of those still held back is given, the verdict on the file."""
        form = self.form
        if isinstance(form, documents.DocumentFormat):
            yield from documents.rows(self.path, form, self.options, report, self._progress)
        else:
            builder = form.builder(self.options, report)
            if isinstance(form, Format):
                yield from reading.rows(self.path, form, builder, report, self._progress, self._fast)
            else:
                yield from parquet.rows(self.path, form, builder, report, self._progress)
        report.check(final=True)

    def _new_report(self) -> Report:
        form = self.form
        return Report(str(self.path), form.name, form.kind, max_malformed=self._max_malformed, unit=form.unit)

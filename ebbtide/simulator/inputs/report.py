"""Report of a reader on a file: what was read, what was malformed and where, what was left out and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from ebbtide.simulator.errors import InvalidParameter, TraceError

#: Malformed lines that a report shows.
EXAMPLES: Final = 10
#: Share of malformed lines above which a trace is not to be trusted.
MAX_MALFORMED: Final = 0.01
#: Lines before which nothing is said of shares: a wrong file is given up early, one bad line at the top is not.
_SOON: Final = 10_000


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One malformed line: where it stands, which field is wrong, and how."""

    line: int
    field: str
    problem: str


@dataclass(slots=True)
class Report:
    """Counts of one reading. At the end ``lines == comments + read + malformed``.

    ``read`` lines are well formed. Of table formats each gives one row or is counted in ``skipped`` with the reason,
    so that ``read == given + sum(skipped)``; of formats of events several lines make a row.
    """

    file: str
    format: str
    kind: str
    #: What `lines` counts: line, row (Parquet) or element (JSON).
    place: str = "line"
    max_malformed: float = MAX_MALFORMED
    lines: int = 0
    #: Comments, blank lines and the header.
    comments: int = 0
    read: int = 0
    malformed: int = 0
    given: int = 0
    #: Lines that go on behind the format's last column, where it allows that; the rest of them is not read.
    longer: int = 0
    #: Well-formed lines that are no row, by reason.
    skipped: Counter[str] = field(default_factory=Counter)
    #: Rows that stood later in the file than their time, and were put right.
    reordered: int = 0
    examples: list[Fault] = field(default_factory=list)
    #: The instant of 0 s, where the file has calendar times.
    origin: str | None = None
    #: Of a series: the unit of its values.
    unit: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_malformed <= 1:
            raise InvalidParameter("max_malformed", f"must be a share between 0 and 1, not {self.max_malformed:g}")

    def fault(self, fault: Fault) -> None:
        """Count a malformed line, of those that `count` has seen or is about to."""
        self.malformed += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(fault)

    def check(self, final: bool = False) -> None:
        """Give up where too much is malformed.

        :raises TraceError: the share is above ``max_malformed``, or the file has no row at all; names the first line.
        """
        rows = self.read + self.malformed
        if self.malformed > self.max_malformed * (rows if final else max(rows, _SOON)):
            first = self.examples[0]
            raise TraceError(
                self.file,
                f"{first.problem}; {self.malformed} of {rows} {self.place}s are malformed "
                f"({self.malformed / rows:.2%}, allowed are {self.max_malformed:.2%})",
                line=first.line,
                field=first.field,
                place=self.place,
            )
        if final and not rows:
            raise TraceError(self.file, f"has no {self.place} of the format {self.format}", line=1, place=self.place)

    def as_json(self) -> dict[str, Any]:
        """The counts as JSON knows them."""
        return {
            "file": self.file,
            "format": self.format,
            "kind": self.kind,
            "place": self.place,
            "lines": self.lines,
            "comments": self.comments,
            "read": self.read,
            "malformed": self.malformed,
            "given": self.given,
            "longer": self.longer,
            "skipped": dict(self.skipped),
            "reordered": self.reordered,
            "examples": [{"line": f.line, "field": f.field, "problem": f.problem} for f in self.examples],
            "origin": self.origin,
            "unit": self.unit,
        }

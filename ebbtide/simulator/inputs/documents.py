"""Formats that are one JSON document: small by nature, held in one piece, each element of a list a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ebbtide.simulator.errors import TraceError
from ebbtide.simulator.inputs import sources
from ebbtide.simulator.inputs.report import Report
from ebbtide.simulator.inputs.tables import BUFFER, Options, Rows

#: Above this a document is refused: it would have to be held as a whole.
MOST_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class DocumentFormat:
    """A format of one JSON document.

    :param recognises: whether a document is of this format, by its outermost names.
    :param read: rows of a document; counts elements in the report.
    """

    name: str
    title: str
    kind: str
    recognises: Callable[[Any], bool]
    read: Callable[[Any, Options, Report], Iterator[Rows]]
    defaults: Mapping[str, float | str] = field(default_factory=dict)
    order: str = BUFFER
    calendar: bool = False
    unit: str | None = None


def rows(
    path: Path, form: DocumentFormat, options: Options, report: Report, progress: sources.Progress | None
) -> Iterator[Rows]:
    """All rows of a document.

    :raises TraceError: no JSON, another format, or too much is malformed.
    """
    document = load(path, progress)
    if not form.recognises(document):
        raise TraceError(str(path), f"is no document of the format {form.name} ({form.title})", line=1)
    report.place = "element"
    yield from form.read(document, options, report)


def load(path: Path, progress: sources.Progress | None = None) -> Any:
    """The document in a file.

    :raises TraceError: it cannot be read, is too large or no JSON.
    """
    try:
        return json.loads(sources.whole(path, MOST_BYTES, progress))
    except json.JSONDecodeError as error:
        problem = f"is no JSON in column {error.colno}: {error.msg}"
        raise TraceError(str(path), problem, line=error.lineno, field="document") from None
    except UnicodeDecodeError as error:
        raise TraceError(str(path), f"is no JSON: {error}", line=1, field="document") from None
    except (RecursionError, ValueError) as error:
        # Nested without end, or a number with more digits than Python reads.
        raise TraceError(str(path), f"is no JSON that can be read: {error}", line=1, field="document") from None

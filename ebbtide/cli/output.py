"""Output of the commands: tables, JSON, YAML or names on stdout, progress and errors on stderr."""

from __future__ import annotations

import datetime
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from ebbtide.errors import EbbError

if TYPE_CHECKING:
    from ebbtide.messages.common import Vector

Row = TypeVar("Row")


def print_json(data: Any) -> None:
    """Print one JSON document; pydantic bodies stand as they do on the wire."""
    print(json.dumps(plain(data), indent=2))


def text_of(data: Any) -> str:
    """A body as one line of JSON."""
    return json.dumps(plain(data))


def yaml_of(data: Any) -> str:
    """A document of YAML."""
    import yaml

    text: str = yaml.safe_dump(plain(data), sort_keys=False, allow_unicode=True, width=110)
    return "---\n" + text.rstrip("\n")


def print_yaml(data: Any) -> None:
    """Print one YAML document, with what `print_json` prints."""
    print(yaml_of(data).removeprefix("---\n"))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines for a program that reads them as they come. Raises BrokenPipeError where none reads any more."""
    for line in lines:
        print(shown(line), flush=True)
    if reader_is_gone():
        raise BrokenPipeError


def clock(at: float) -> str:
    """Date and time of day, in the zone of this machine."""
    return datetime.datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def plain(data: Any) -> Any:
    """Bodies turned into what JSON knows, also inside lists and mappings."""
    if hasattr(data, "model_dump"):
        return data.model_dump(mode="json")
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    return data


def name_of(row: Any) -> str:
    """What a thing goes by: its name, its request id, its number."""
    return next((str(row[key]) for key in ("name", "request_id", "machine", "id", "domain") if key in row), "")


def names_of(data: Any) -> list[str]:
    """The names in a document: of a list's rows, or its own."""
    data = plain(data)
    rows = next((value for value in data.values() if isinstance(value, list)), [])
    return [own] if (own := name_of(data)) else [name_of(row) for row in rows]


def shown(text: str, keep: str = "\n") -> str:
    """Words of guests, hosts and other people, without what a terminal would obey, but for what is to be kept."""
    return "".join(c if c.isprintable() or c in keep else "\ufffd" for c in text)


@dataclass(frozen=True)
class Table(Generic[Row]):
    """The columns of a list: how each is got of a row, the ones that `-o wide` has besides."""

    columns: Mapping[str, Callable[[Row], object]]
    wide: Mapping[str, Callable[[Row], object]]
    #: The sentence for a list without rows.
    empty: str

    def print(self, rows: Iterable[Row], *, wide: bool = False, headed: bool = True) -> None:
        columns = {**self.columns, **(self.wide if wide else {})}
        cells = [[of(row) for of in columns.values()] for row in rows]
        print_table(tuple(columns), cells, self.empty, headed=headed)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str, *, headed: bool = True) -> None:
    """Print rows under their headings; the sentence ``empty`` where there are none. Nothing is cut off in a pipe."""
    rows = list(rows)
    if not rows:
        print(shown(empty))
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        widest = [max(cell_len(shown(str(cell))) for cell in column) for column in zip(columns, *rows, strict=True)]
        console = Console(highlight=False, width=max(200, sum(widest) + 3 * len(widest)))
    table = RichTable(box=None, pad_edge=False, header_style="bold", show_header=headed)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(str(cell))) for cell in row))
    console.print(table)


def clear() -> None:
    """Begin the terminal anew."""
    from rich.console import Console

    Console().clear()


def size(vector: Vector) -> str:
    """A size in words."""
    return str(vector.vector())


class Steps:
    """Progress on stderr: a live line on a terminal, a line a step otherwise. Use as a context manager.

    :param quiet: print nothing at all.
    """

    def __init__(self, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._clock = clock
        self._begin_s = clock()
        self._status = self._console.status("") if self._console.is_terminal and not quiet else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, sentence: str) -> None:
        """A step has begun or something was done."""
        if self._quiet:
            return
        from rich.text import Text

        sentence = shown(sentence)
        line = Text(f"{self._clock() - self._begin_s:7.1f} s  {sentence}")
        if self._status is not None:
            self._status.update(Text(sentence))
        self._console.print(line, soft_wrap=True)


class _Output(io.FileIO):
    """An output whose reader may go: what a command does is not broken off by that, nor its exit code changed.

    :param number: its file descriptor.
    :param is_told: whether it is an error that it cannot be written.
    """

    def __init__(self, number: int, is_told: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self._is_told = is_told
        #: Nothing more can be written.
        self.over = False

    def write(self, data: Any) -> int:
        if not self.over:
            try:
                return super().write(data) or 0
            except BrokenPipeError:
                self.over = True
            except OSError as error:
                self.over = True
                if self._is_told:
                    raise OutputError(f"the output cannot be written: {error.strerror}") from error
        return len(data)


class OutputError(EbbError):
    """Nothing more can be printed."""


def guard_output() -> None:
    """Have both outputs end quietly where their readers go, and standard output with a sentence where it cannot be
    written."""
    if sys.stderr is None:  # it is closed, and `print` would take standard output for it
        # Its number is never free again, or the next file would get it, and what is said of errors.
        sys.stderr = io.TextIOWrapper(io.FileIO(os.open(os.devnull, os.O_WRONLY), "w", closefd=False))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it is closed
            continue
        stream.flush()
        try:
            raw = _Output(stream.fileno(), is_told=name == "stdout")
        except io.UnsupportedOperation:  # a program that calls `main` has put something else there
            continue
        guarded = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=stream.encoding,
            # A bar that an old terminal does not know is no reason to end.
            errors="replace" if stream.errors == "strict" else stream.errors,
            line_buffering=name == "stderr" or stream.isatty(),
        )
        setattr(sys, name, guarded)


def reader_is_gone() -> bool:
    """Whether what is printed from now on reaches no reader."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _Output) and raw.over


def print_error(sentence: str) -> None:
    """One error on stderr."""
    print(f"error: {shown(sentence)}", file=sys.stderr)

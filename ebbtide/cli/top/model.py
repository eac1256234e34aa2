"""State of `ebb top`: answers of the manager and keys go in, lines of a screen come out. Pure.

A row keeps the cursor when the order changes around it. What is shown is worked out for the rows on the screen only,
since there may be 20,000.
"""

from __future__ import annotations

import datetime
from collections import Counter, deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

from ebbtide.cli.top.columns import HOSTS, MIB_PER_GIB, VMS, Column, held, table_line, taken, widths
from ebbtide.cli.top.drawing import Line, Style, bar, cleaned, clipped, figure, fitted
from ebbtide.cli.top.layers import layer_lines
from ebbtide.client.connection import Changed
from ebbtide.messages.explanations import Event, VMExplanation
from ebbtide.messages.hosts import HostStatus
from ebbtide.messages.vms import ClusterVM

#: So many events are kept.
EVENTS: Final = 200
#: Lines that are never given to the table: title, two bars, the table's head, the line of keys.
_FIXED: Final = 5
_KEYS: Final = "q quit  Tab hosts/VMs  Enter in  Esc back  <> sort  r reverse  / filter  ? help"
_HELP: Final = (
    "Tab          hosts, or VMs",
    "Enter        of a host its VMs, of a VM its layers",
    "Esc          back: layers, filter, the host whose VMs are shown",
    "up down      a row, also j and k; PgUp PgDn a page, Home End",
    "< >          sort by the column to the left or right; r the other way round",
    "/            show only rows with a word in their name, host or state; several words: all of them",
    "^L           draw the screen anew",
    "q            quit",
    "",
    "Hosts: # held, = held and deflatable, empty free.  VMs: # held, - taken of nominal, | minimum.",
)


class View(StrEnum):
    """What the table shows."""

    HOSTS = "hosts"
    VMS = "VMs"


class Top:
    """All that is known and chosen.

    :param manager: whose cluster it is, for the first line.
    """

    def __init__(self, manager: str, view: View = View.HOSTS) -> None:
        self.manager = manager
        self.view = view
        self.over = False
        #: The VM whose layers are shown.
        self.detail: str | None = None
        self._told: VMExplanation | str | None = None
        #: By which the next question gets what is new.
        self.hosts_since = self.vms_since = 0
        self._rows: dict[View, dict[str, Any]] = {View.HOSTS: {}, View.VMS: {}}
        self._events: deque[Event] = deque(maxlen=EVENTS)
        self._failure = ""
        self._sorted: dict[View, tuple[int, bool]] = {View.HOSTS: (3, False), View.VMS: (3, False)}
        self._cursor: dict[View, str | None] = {View.HOSTS: None, View.VMS: None}
        self._at: dict[View, int] = {View.HOSTS: 0, View.VMS: 0}
        self._offset: dict[View, int] = {View.HOSTS: 0, View.VMS: 0}
        self._filter = ""
        self._typing: str | None = None
        self._of_host: str | None = None
        self._help = False
        self._page = 10
        #: The rows of the view in their order, and the sums; None: to be worked out again.
        self._order: list[tuple[str, Any]] | None = None
        self._sums: tuple[str, list[Line]] | None = None
        self._bar_width = 0

    # --- what has been answered --------------------------------------------------------------------------------------

    def put_hosts(self, found: Changed[HostStatus]) -> None:
        """Hosts that have changed, or all."""
        self.hosts_since = found.changes
        self._put(View.HOSTS, {host.id: host for host in found.rows}, found)

    def put_vms(self, found: Changed[ClusterVM]) -> None:
        """VMs that have changed, or all."""
        self.vms_since = found.changes
        self._put(View.VMS, {vm.name: vm for vm in found.rows}, found)

    def _put(self, view: View, rows: dict[str, Any], found: Changed[Any]) -> None:
        self._failure = ""
        if found.is_whole:
            self._rows[view] = rows
        elif rows or found.gone:
            self._rows[view].update(rows)
            for name in found.gone:
                self._rows[view].pop(name, None)
        else:
            return
        self._order = self._sums = None

    def put_event(self, event: Event) -> None:
        """Something that has happened after all others."""
        self._events.append(event)

    def put_layers(self, name: str, told: VMExplanation | str) -> None:
        """A VM's explanation, or why there is none; dropped where another VM is looked at by now."""
        if name == self.detail:
            self._told = told

    def fail(self, sentence: str) -> None:
        """The manager does not answer; what is shown is what it answered last."""
        self._failure = sentence

    # --- keys --------------------------------------------------------------------------------------------------------

    def press(self, key: str) -> None:
        """A key: a character, or up, down, pageup, pagedown, home, end, enter, escape, tab, backspace."""
        if self._typing is not None:
            self._type(key)
            return
        if self._help:
            self._help = False
            return
        match key:
            case "q" | "Q":
                self.over = True
            case "?" | "h":
                self._help = True
            case "tab":
                self._show(View.VMS if self.view is View.HOSTS else View.HOSTS, None)
            case "enter":
                self._enter()
            case "escape":
                self._back()
            case "/":
                self._typing = self._filter
            case "<" | ">":
                self._sort_by(1 if key == ">" else -1)
            case "r":
                column, reverse = self._sorted[self.view]
                self._sorted[self.view] = column, not reverse
                self._order = None
            case _:
                self._move(key)

    def _type(self, key: str) -> None:
        assert self._typing is not None
        if key == "enter":
            self._filter, self._typing, self._order = self._typing, None, None
        elif key == "escape":
            self._typing = None
        elif key == "backspace":
            self._typing = self._typing[:-1]
        elif len(key) == 1 and key.isprintable():
            self._typing += key

    def _enter(self) -> None:
        name = self._chosen()
        if name is None:
            return
        if self.view is View.HOSTS:
            self._show(View.VMS, name)
        else:
            self.detail, self._told = name, None

    def _back(self) -> None:
        if self.detail is not None:
            self.detail = self._told = None
        elif self._filter:
            self._filter, self._order = "", None
        elif self._of_host is not None:
            self._show(View.HOSTS, None)

    def _show(self, view: View, of_host: str | None) -> None:
        self.view, self._of_host, self._order = view, of_host, None
        self.detail = self._told = None

    def _sort_by(self, step: int) -> None:
        column, _ = self._sorted[self.view]
        self._sorted[self.view] = (column + step) % len(self._columns()), False
        self._order = None

    def _move(self, key: str) -> None:
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -self._page, "pagedown": self._page}
        rows = self._ordered()
        at = self._index(rows)
        if key in steps:
            at += steps[key]
        elif key in ("home", "end"):
            at = 0 if key == "home" else len(rows) - 1
        else:
            return
        if rows:
            self._at[self.view] = at = min(max(at, 0), len(rows) - 1)
            before, self._cursor[self.view] = self._cursor[self.view], rows[at][0]
            if self.detail is not None and before != rows[at][0]:
                self.detail, self._told = rows[at][0], None

    # --- rows --------------------------------------------------------------------------------------------------------

    def _columns(self) -> Sequence[Column[Any]]:
        return HOSTS if self.view is View.HOSTS else VMS

    def _ordered(self) -> list[tuple[str, Any]]:
        if self._order is None:
            words = self._filter.lower().split()
            rows = [
                (name, row)
                for name, row in self._rows[self.view].items()
                if (self._of_host is None or row.host == self._of_host) and _has(row, words)
            ]
            rows.sort(key=lambda pair: pair[0])
            number, reverse = self._sorted[self.view]
            column = self._columns()[number]
            rows.sort(key=lambda pair: column.value(pair[1]), reverse=column.largest_first is not reverse)
            self._order = rows
        return self._order

    def _index(self, rows: Sequence[tuple[str, Any]]) -> int:
        """Where the cursor is: at the same row as before, or where that was."""
        cursor, at = self._cursor[self.view], self._at[self.view]
        if not (at < len(rows) and rows[at][0] == cursor):
            at = next((at for at, (name, _) in enumerate(rows) if name == cursor), min(at, max(len(rows) - 1, 0)))
            self._at[self.view] = at
        return at

    def _chosen(self) -> str | None:
        rows = self._ordered()
        return rows[self._index(rows)][0] if rows else None

    # --- lines -------------------------------------------------------------------------------------------------------

    def lines(self, width: int, height: int, now: float) -> list[Line]:
        """Exactly ``height`` lines of at most ``width`` columns.

        :param now: seconds since the epoch.
        """
        head = self._head(width, now)
        if self._help:
            body: list[Line] = [[(text, "plain")] for text in _HELP]
        else:
            # The table keeps at least half.
            spare = max(height - _FIXED, 0) // 2
            layers = self._layers(width, spare) if self.detail is not None else []
            events = self._event_lines(min(spare - len(layers), 8))
            body = self._table(width, height - _FIXED - len(layers) - len(events)) + layers + events
        lines = [*head, *body][: max(height - 1, 0)]
        lines += [[] for _ in range(height - 1 - len(lines))]
        return [clipped(line, width) for line in [*lines, self._foot(width)][:height]]

    def document(self) -> dict[str, list[Any]]:
        """All that is known, for programs; hosts and VMs by name, events oldest first."""
        rows = {view: [row for _, row in sorted(self._rows[view].items())] for view in View}
        return {"hosts": rows[View.HOSTS], "vms": rows[View.VMS], "events": list(self._events)}

    def snapshot(self, width: int, now: float) -> list[Line]:
        """All rows and the latest events, for a file or a pipe."""
        rows = self._ordered()
        return [*self._head(width, now), *self._table(width, len(rows), marked=False), *self._event_lines(EVENTS)]

    def _head(self, width: int, now: float) -> list[Line]:
        if self._sums is None or self._bar_width != width:
            self._sums = self._added_up(width)
        clock = datetime.datetime.fromtimestamp(now).astimezone().strftime("%H:%M:%S")
        return [[(f"ebb top {clock}  {self._sums[0]}  {cleaned(self.manager)}", "bold")], *self._sums[1]]

    def _added_up(self, width: int) -> tuple[str, list[Line]]:
        """The counts in words, and the bars of all hosts that report."""
        self._bar_width = width
        hosts: list[HostStatus] = list(self._rows[View.HOSTS].values())
        vms: list[ClusterVM] = list(self._rows[View.VMS].values())
        said = f"{_counted('host', [host.state for host in hosts])}; {_counted('VM', [vm.state for vm in vms])}"
        # What a silent host has and holds is not known: the counts in words tell of it.
        silent = {host.id for host in hosts if host.state == "silent"}
        hosts = [host for host in hosts if host.id not in silent]
        vms = [vm for vm in vms if vm.host not in silent]
        bars: list[Line] = []
        for name, word, unit, scale in (("cpu_cores", "CPU", "cores", 1.0), ("memory_mib", "mem", "GiB", MIB_PER_GIB)):
            most = sum(getattr(host.capacity, name) for host in hosts)
            holds = sum(held(host, name) for host in hosts)
            can_give = min(sum(getattr(host.deflatable, name) for host in hosts), holds)
            lacks = sum(taken(vm, name) for vm in vms)
            text = (
                f" {figure(holds / scale)}/{figure(most / scale)} {unit} held, {figure(can_give / scale)} deflatable, "
                f"{figure(lacks / scale)} taken"
            )
            parts: list[tuple[float, str, Style]] = [(holds - can_give, "#", "held"), (can_give, "=", "deflatable")]
            drawn = bar(max(width - 4 - len(text), 6), most, parts)
            bars.append([(f"{word} ", "bold"), *drawn, (text, "plain")])
        return said, bars

    def _table(self, width: int, height: int, marked: bool = True) -> list[Line]:
        """The head and so many lines of rows, with the cursor among them."""
        columns = self._columns()
        shown = widths(columns, width)
        by, reverse = self._sorted[self.view]
        titles = []
        for column, wide in shown:
            sign = ("v" if column.largest_first is not reverse else "^") if column is columns[by] else ""
            titles.append(fitted(column.title + sign, wide, column.right))
        head: Line = [(fitted(" ".join(titles), width), "head")]
        rows = self._ordered()
        self._page = max(height, 1)
        at = self._index(rows)
        offset = min(max(self._offset[self.view], at - height + 1, 0), at) if marked else 0
        # No empty lines below while there are rows above.
        offset = max(min(offset, len(rows) - height), 0)
        self._offset[self.view] = offset
        found: list[Line] = [head]
        for number, (_, row) in enumerate(rows[offset : offset + max(height, 0)], offset):
            alarm = getattr(row, "state", "") in ("silent", "unavailable", "overcommitted", "failed")
            style: Style = "selected" if marked and number == at else "alarm" if alarm else "plain"
            found.append(table_line(shown, row, style))
        if not rows:
            found.append([(self._nothing(), "dim")])
        found += [[] for _ in range(height + 1 - len(found))]
        return found

    def _nothing(self) -> str:
        if self._filter or self._of_host:
            return f"no {self.view} here{f' with {self._filter!r}' if self._filter else ''}; Esc shows all"
        return f"there are no {self.view}" if self.hosts_since or self.vms_since else "the manager is asked ..."

    def _layers(self, width: int, most: int) -> list[Line]:
        told = self._told
        title = f"layers of {self.detail}"
        body: list[Line] = [[(fitted(title, width), "head")]]
        if isinstance(told, str):
            body.append([(cleaned(told), "alarm")])
        else:
            body += layer_lines(told) if told is not None else [[("its host is asked ...", "dim")]]
        return body[: max(most, 2)]

    def _event_lines(self, most: int) -> list[Line]:
        """The latest events, the last one at the bottom."""
        if most < 2:
            return []
        found: list[Line] = [[("events", "dim")]]
        for event in list(self._events)[-(most - 1) :]:
            at = datetime.datetime.fromtimestamp(event.at).astimezone().strftime("%m-%d %H:%M:%S")
            found.append([(f"{at} ", "dim"), (f"{event.kind:<12} ", "bold"), (cleaned(event.sentence), "plain")])
        return found

    def _foot(self, width: int) -> Line:
        if self._typing is not None:
            return [(f"/{self._typing}_  Enter takes it, Esc does not", "bold")]
        if self._failure:
            return [(fitted(f"old figures: {self._failure}", width), "alarm")]
        chosen = [f"host {self._of_host}"] if self._of_host is not None else []
        chosen += [f"filter {self._filter!r}"] if self._filter else []
        here = f"{', '.join(chosen)}: {len(self._ordered())} {self.view}  " if chosen else ""
        return [(here, "bold"), (_KEYS, "dim")]


def _has(row: Any, words: Sequence[str]) -> bool:
    if not words:
        return True
    said = f"{getattr(row, 'name', '') or row.id} {getattr(row, 'host', '')} {row.state}".lower()
    return all(word in said for word in words)


def _counted(word: str, states: Sequence[str]) -> str:
    """So many, and how many of each state where they are not all of one."""
    if not states:
        return f"no {word}s"
    counts = Counter(states).most_common()
    each = ", ".join(f"{number} {state}" for state, number in counts)
    return f"{len(states)} {word}{'s' if len(states) > 1 else ''}: {each}"

"""The terminal of `ebb top`: curses of the standard library, which sends only the cells that have changed."""

from __future__ import annotations

import asyncio
import contextlib
import curses
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from ebbtide.cli.top.drawing import Line, Style
from ebbtide.cli.top.model import Top
from ebbtide.errors import EbbError

_KEYS: Final = {
    curses.KEY_UP: "up",
    curses.KEY_DOWN: "down",
    curses.KEY_PPAGE: "pageup",
    curses.KEY_NPAGE: "pagedown",
    curses.KEY_HOME: "home",
    curses.KEY_END: "end",
    curses.KEY_ENTER: "enter",
    curses.KEY_BACKSPACE: "backspace",
    8: "backspace",
    9: "tab",
    10: "enter",
    13: "enter",
    27: "escape",
    127: "backspace",
}
_REDRAW: Final = 12  # ^L
#: Colours beside what bold, reverse and the characters say already.
_COLOURS: Final[dict[Style, int]] = {
    "held": curses.COLOR_BLUE,
    "deflatable": curses.COLOR_GREEN,
    "taken": curses.COLOR_YELLOW,
    "alarm": curses.COLOR_RED,
}
_LOOKS: Final[dict[Style, int]] = {
    "bold": curses.A_BOLD,
    "dim": curses.A_DIM,
    "head": curses.A_REVERSE,
    "selected": curses.A_REVERSE | curses.A_BOLD,
    "alarm": curses.A_BOLD,
}


class Terminal:
    """The screen while `ebb top` has it.

    :param hurried: is called after a key.
    """

    def __init__(self, window: curses.window, top: Top, hurried: Callable[[], None]) -> None:
        self._window = window
        self._top = top
        self._hurried = hurried
        self._drawn: list[Line] = []
        self._styles: dict[Style, int] = dict(_LOOKS)
        if curses.has_colors() and "NO_COLOR" not in os.environ:
            curses.use_default_colors()
            for number, (style, colour) in enumerate(_COLOURS.items(), 1):
                curses.init_pair(number, colour, -1)
                self._styles[style] = self._styles.get(style, 0) | curses.color_pair(number)

    def draw(self) -> None:
        """Draw the lines that differ from the last picture's."""
        height, width = self._window.getmaxyx()
        lines = self._top.lines(width, height, time.time())
        if len(lines) != len(self._drawn):
            self._drawn = []
            self._window.erase()
        for y, line in enumerate(lines):
            if self._drawn and self._drawn[y] == line:
                continue
            # The last cell of all cannot be written without scrolling; curses says so after having written it.
            with contextlib.suppress(curses.error):
                self._window.move(y, 0)
                self._window.clrtoeol()
                for text, style in line:
                    self._window.addstr(text, self._styles.get(style, 0))
        self._drawn = lines
        self._window.refresh()

    def read(self) -> None:
        """Take the keys that have come."""
        while (code := self._window.getch()) != -1:
            if code == _REDRAW:
                self._anew()
            elif (key := _KEYS.get(code) or (chr(code) if 32 <= code < 127 else None)) is not None:
                self._top.press(key)
        self._hurried()
        self.draw()

    def resize(self) -> None:
        """The window has another size."""
        with contextlib.suppress(OSError):
            width, height = os.get_terminal_size(sys.stdout.fileno())
            curses.resizeterm(height, width)
        self._anew()
        self.draw()

    def _anew(self) -> None:
        self._drawn = []
        self._window.clear()


@contextlib.contextmanager
def curses_window() -> Iterator[curses.window]:
    """The whole terminal, which is as it was afterwards, whatever happens.

    :raises EbbError: there is none that can be drawn on.
    """
    why = "`ebb top` needs a terminal; `ebb top --once` prints one picture"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise EbbError(why)
    try:
        curses.setupterm()
        if not curses.tigetstr("cup"):
            raise EbbError(f"the terminal {os.environ.get('TERM', '')!r} has no cursor that moves: {why}")
    except curses.error as error:
        raise EbbError(f"the terminal {os.environ.get('TERM', '')!r} is not known here: {why}") from error
    # A lone Esc is meant at once.
    os.environ.setdefault("ESCDELAY", "50")
    window = curses.initscr()
    try:
        curses.noecho()
        curses.cbreak()
        window.keypad(True)
        window.nodelay(True)
        if curses.has_colors():
            curses.start_color()
        with contextlib.suppress(curses.error):
            curses.curs_set(0)
        yield window
    finally:
        window.keypad(False)
        curses.nocbreak()
        curses.echo()
        with contextlib.suppress(curses.error):
            curses.curs_set(1)
        curses.endwin()


async def until_quit(terminal: Terminal, top: Top, work: Coroutine[Any, Any, None]) -> None:
    """Keep the screen up to date until the user quits, or the process is to end."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        terminal.read()
        if top.over:
            over.set()

    loop.add_reader(sys.stdin.fileno(), read)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, over.set)
    loop.add_signal_handler(signal.SIGWINCH, terminal.resize)
    task = asyncio.create_task(work, name="ebb top")
    waits = asyncio.create_task(over.wait(), name="ebb top: quit")
    try:
        terminal.draw()
        done, _ = await asyncio.wait((task, waits), return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            task.result()
    finally:
        loop.remove_reader(sys.stdin.fileno())
        for each in (task, waits):
            each.cancel()
        await asyncio.gather(task, waits, return_exceptions=True)

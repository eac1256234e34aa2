"""Pieces of lines on a terminal: words cut to a width, figures, bars. Pure; no meaning is by colour alone."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Literal, TypeAlias

from ebbtide.deflation.resources import TOLERANCE

#: How a piece looks; what it means stands in its words and characters too.
Style = Literal["plain", "bold", "dim", "head", "selected", "held", "deflatable", "taken", "alarm"]
Segment: TypeAlias = tuple[str, Style]
Line: TypeAlias = list[Segment]


def cleaned(text: str) -> str:
    """Words of other people as so many columns as characters, without what a terminal would obey."""
    if text.isascii() and text.isprintable():
        return text
    kept = (c for c in text.replace("\n", " ") if not unicodedata.combining(c))
    return "".join("?" if unicodedata.east_asian_width(c) in "WF" or not c.isprintable() else c for c in kept)


def fitted(text: str, width: int, right: bool = False) -> str:
    """Exactly so wide: what is cut off leaves a ``>``."""
    text = cleaned(text)
    if len(text) > width:
        return text[: width - 1] + ">" if width > 0 else ""
    return text.rjust(width) if right else text.ljust(width)


def figure(value: float) -> str:
    """Three digits or so."""
    text = f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def pair(have: float, of: float) -> str:
    """So much of so much."""
    return f"{figure(have)}/{figure(of)}"


def bar(width: int, most: float, parts: Sequence[tuple[float, str, Style]], mark: float | None = None) -> Line:
    """A bar in brackets.

    :param width: in columns, brackets and all.
    :param most: what the whole bar stands for; 0: nothing is known of it, and it is empty.
    :param parts: from the left: how much, drawn by which character, in which style.
    :param mark: where a ``|`` stands.
    """
    cells: list[Segment] = [(" ", "plain")] * max(width - 2, 0)
    reached, begin = 0.0, 0
    for amount, character, style in parts if most > TOLERANCE else ():
        reached = min(reached + max(amount, 0.0), most)
        end = round(reached / most * len(cells))
        if amount > 0 and end == begin < len(cells):
            # A little is not nothing.
            end += 1
        cells[begin:end] = [(character, style)] * (end - begin)
        begin = max(begin, end)
    if mark is not None and most > TOLERANCE and 0 < mark < most and cells:
        at = min(int(mark / most * len(cells)), len(cells) - 1)
        cells[at] = ("|", "bold")
    return joined([("[", "plain"), *cells, ("]", "plain")])


def joined(line: Line) -> Line:
    """The same with neighbours of one style in one piece."""
    found: Line = []
    for text, style in line:
        if found and found[-1][1] == style:
            found[-1] = (found[-1][0] + text, style)
        elif text:
            found.append((text, style))
    return found


def clipped(line: Line, width: int) -> Line:
    """The line up to a width."""
    found: Line = []
    for text, style in line:
        if width <= 0:
            break
        found.append((text[:width], style))
        width -= len(text)
    return found


def text_of(line: Line) -> str:
    """A line without its styles."""
    return "".join(text for text, _ in line).rstrip()

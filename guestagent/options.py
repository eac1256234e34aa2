"""Options of the guest agent from a file, the environment and the command line, in this order; the last counts.

The file is TOML without arrays and tables: lines ``key = value`` and comments. (Python has had a reader of TOML since
3.11 only; what this one takes means the same to every other.)
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Any, Mapping, Sequence

from guestagent.errors import GuestAgentError

FILE = "/etc/ebbtide/guestagent.toml"
PREFIX = "EBB_GUESTAGENT_"
#: Not in the file: they ask for something else than to serve, or for the file itself.
ON_THE_COMMAND_LINE = ("help", "version", "config", "check_config", "example_config", "command")

_KEY = re.compile(r"""(?:([A-Za-z0-9_-]+)|"([^"\\]*)"|'([^']*)')[ \t]*=[ \t]*""")
_TEXT = re.compile(r'"((?:[^"\\]|\\["\\])*)"|' + r"'([^']*)'")
_NUMBER = re.compile(r"[+-]?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_REST = re.compile(r"[ \t]*(?:#.*)?\Z")
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f]")


class OptionsError(GuestAgentError):
    """Options that cannot be: one sentence a line, each of which begins with where its option stands."""


def named(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options that a file may have, by name."""
    return {
        action.dest: action
        for action in parser._actions
        if action.option_strings and action.dest not in ON_THE_COMMAND_LINE
    }


def read_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, environ: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """The options of this call, and as `origins` where those stand that the command line has not given.

    A wrong command line ends the process, as with argparse.

    :raises OptionsError: what the file or the environment says cannot be.
    """
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config")
    path = before.parse_known_args(argv)[0].config or environ.get(PREFIX + "CONFIG")
    if path is None and os.path.exists(FILE):
        path = FILE
    options, values, wrong = named(parser), {}, []
    given = [(name, f"{path}:{line}: {name}", value) for name, line, value in read_file(path)] if path else []
    for name in options:
        text = environ.get(PREFIX + name.upper())
        if text is not None:
            given.append((name, PREFIX + name.upper(), text))
    for name, origin, value in given:
        if name not in options:
            wrong.append(f"{origin}: there is no such option")
            continue
        try:
            values[name] = _checked(options[name], value, from_file=not origin.startswith(PREFIX))
        except ValueError as error:
            wrong.append(f"{origin}: {error}")
    if wrong:
        raise OptionsError("\n".join(wrong))
    parser.set_defaults(**values)
    found = parser.parse_args(argv)
    found.origins = {name: origin for name, origin, _ in given}
    return found


def read_file(path: str) -> list[tuple[str, int, Any]]:
    """The keys of a file with their lines and values.

    :raises OptionsError: it cannot be read, or a line is none that is understood.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise OptionsError(f"{path} cannot be read: {error.strerror}") from None
    found: list[tuple[str, int, Any]] = []
    for number, raw in enumerate(content.replace(b"\r\n", b"\n").split(b"\n"), 1):
        try:
            line = raw.decode("utf-8").strip(" \t")
        except UnicodeDecodeError:
            raise OptionsError(f"{path}:{number}: this is not UTF-8") from None
        if _CONTROL.search(line):
            raise OptionsError(f"{path}:{number}: there is a control character in it")
        if not line or line.startswith("#"):
            continue
        key = _KEY.match(line)
        if key is None:
            raise OptionsError(f"{path}:{number}: this is not like key = value")
        name = next(word for word in key.groups() if word is not None)
        if any(name == other for other, _, _ in found):
            raise OptionsError(f"{path}:{number}: {name}: this is given for the second time")
        try:
            found.append((name, number, _value(line[key.end() :])))
        except ValueError as error:
            raise OptionsError(f"{path}:{number}: {name}: {error}") from None
    return found


def _value(text: str) -> Any:
    quoted, number = _TEXT.match(text), _NUMBER.match(text)
    if quoted is not None and _REST.match(text, quoted.end()):
        plain, literal = quoted.groups()
        return literal if plain is None else re.sub(r"\\(.)", r"\1", plain)
    if number is not None and _REST.match(text, number.end()):
        return float(number[0])
    for word, value in (("true", True), ("false", False)):
        if text.startswith(word) and _REST.match(text, len(word)):
            return value
    raise ValueError('the value must be a "text" on one line, a number, true or false')


def _checked(action: argparse.Action, value: Any, from_file: bool) -> Any:
    """Raises ValueError."""
    if action.nargs == 0:
        words = {"true": True, "1": True, "false": False, "0": False}
        value = value if from_file else words.get(value.lower())
        if not isinstance(value, bool):
            raise ValueError("this must be true or false")
        return value
    number = action.type is not None
    if from_file and (isinstance(value, bool) or isinstance(value, float) is not number):
        raise ValueError(f"this must be a {'number' if number else 'text in quotes'}")
    if callable(action.type):
        try:
            return action.type(str(value))
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from None
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"this must be one of {', '.join(action.choices)}, but is {str(value)[:40]!r}")
    return value


def example(parser: argparse.ArgumentParser) -> str:
    """A file with every option at its default, commented out."""
    lines = [f"# Options of {parser.prog}; `{parser.prog} --help` has them, too."]
    formatter = parser._get_formatter()
    for name, action in named(parser).items():
        default = action.default
        shown = {True: "true", False: "false", None: "..."}.get(default, default)
        quoted = shown if action.nargs == 0 or (action.type is not None and default is not None) else f'"{shown}"'
        quoted = "48" if action.type is not None and default is None else quoted
        lines += ["", f"# {formatter._expand_help(action)}", f"#{name} = {quoted}"]
    return "\n".join(lines) + "\n"

"""Every command that pages, sentences of the code, scripts and units name is one, with the options that it is given."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from ebbtide.cli.main import ALIASES, COMMANDS, app

ROOT = Path(__file__).parents[2]
#: What was true when it was written; and tests of the command line, which say wrong things to it.
LEFT_OUT = re.compile(r"CHANGELOG\.md|tests/(?!guests|system|vagrant).*|docs/openapi/.*|.*\.(lock|png|svg|gz)")
CALL = re.compile(r"(?<![\w./-])ebb(?= [a-z-])([^`\"'\n;|&)(<>\\]*)")
TREE: Any = typer.main.get_command(app)


def texts_of(path: Path) -> Iterator[str]:
    """Where commands may stand in a file, as it is read: strings of Python put together, code spans in one line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        inside = {
            id(part) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                yield node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "ebb":
                yield f"ebb {ast.literal_eval(node.args[0])}" if isinstance(node.args[0], ast.Constant) else ""
    elif path.suffix == ".md":
        fenced = text.split("```")
        yield from fenced[1::2]
        yield from (" ".join(span.split()) for part in fenced[::2] for span in re.findall(r"`([^`]+)`", part))
        yield from (line for part in fenced[::2] for line in part.splitlines() if line.startswith("    "))
    else:
        yield text


def called(text: str) -> Iterator[list[str]]:
    """The words behind each `ebb` in a text, up to where the command ends."""
    for match in CALL.finditer(re.sub(r"\{\{.*?\}\}", "X", text.replace("\\\n", " "))):
        words = re.split(r"\s+#|\s{3,}|[,:] |\.$|\. ", match[1])[0].split()
        yield [word.rstrip(".,:") or word for word in words]


def wrong(words: list[str]) -> str | None:
    """What is wrong with a command; a group alone is right."""
    command, rest, places = TREE, list(words), 0
    while rest and rest[0] != "--":
        word, _, value = rest.pop(0).partition("=")
        if re.match(r"--?[a-z]", word):
            option = next((one for one in command.params if word in (*one.opts, *one.secondary_opts)), None)
            if option is None and word != "--help":
                return f"{word} is no option there"
            if option is not None and not value and not getattr(option, "is_flag", False) and rest:
                rest.pop(0)
        elif word in ("...", "..", "X"):
            return None
        elif hasattr(command, "commands"):
            if word not in command.commands:
                return f"{word!r} is no command there"
            command = command.get_command(None, word)
            places = (
                99 if any(p.nargs == -1 for p in command.params) else sum(p.opts[0][0] != "-" for p in command.params)
            )
        elif (places := places - 1) < 0:
            return f"{word!r} has no place there"
    return None


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listed.split("\0") if name and not LEFT_OUT.fullmatch(name)]
    return [path for path in paths if (ROOT / path).is_file() and b"ebb " in (ROOT / path).read_bytes()]


def test_commands_that_are_named_exist() -> None:
    found = [(path, words) for path in tracked() for text in texts_of(ROOT / path) for words in called(text)]
    assert len(found) > 300
    mistakes = [f"{path}: ebb {' '.join(words)}: {why}" for path, words in found if (why := wrong(words))]
    assert not mistakes, "\n".join(mistakes)


def test_a_command_that_is_given_a_list_is_not_run_where_it_is_empty() -> None:
    """xargs runs its command once all the same, and `ebb vm start` alone is an error."""
    piped = [
        found for path in tracked() for found in re.findall(r"\| xargs (.*?)\bebb ", (ROOT / path).read_text("utf-8"))
    ]
    assert piped
    assert [options for options in piped if "-r" not in options.split()] == []


def test_the_page_of_the_command_line_has_every_verb_of_a_noun() -> None:
    page = (ROOT / "docs/reference/command-line.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `ebb (\w+)` \| [^`|]+: `([a-z ]+)` \|$", page, re.MULTILINE)
    assert len(rows) >= 7
    for noun, verbs in rows:
        group = TREE.get_command(None, noun)
        assert set(verbs.split()) == {name for name, one in group.commands.items() if not one.hidden}, noun


def test_every_command_is_named_by_its_example_and_short_forms_by_none() -> None:
    for words, _, example in COMMANDS:
        calls = list(called(example))
        assert calls, words
        for call in calls:
            assert call[: len(words.split())] == words.split()
    assert set(ALIASES.values()) <= {words for words, _, _ in COMMANDS}
    assert len(ALIASES) == 10


@pytest.mark.parametrize(
    "text",
    [
        "`ebb vmm list`",
        "`ebb tasks list`",
        "$ ebb vm list --json",
        "ebb off host-a",
        "`ebb host host-a`",
        "ebb --no x vms",
    ],
)
def test_what_is_no_command_is_found(text: str) -> None:
    assert [wrong(words) for words in called(text)] != [None]


@pytest.mark.parametrize(
    "text", ["`ebb vm`", "ebb --ca ~/ca.pem vm list -o json", "$ sudo ebb task submit t -- prog --any", "`ebb lab ...`"]
)
def test_what_is_one_is_not(text: str) -> None:
    assert [wrong(words) for words in called(text)] == [None]

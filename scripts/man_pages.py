"""Writes the man pages of a package into a folder: ``man_pages.py ebbtide|ebbtide-guest FOLDER``.

Nothing of them is written by hand: they are made of the programs' own parsers, as the site's pages are.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from guestagent import __version__


def quoted(text: str) -> str:
    """Text as roff takes it: no line of it is a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def section(name: str, *parts: str) -> str:
    return "\n".join([f".SH {name}", *parts])


def listed(head: str, text: str) -> str:
    return f".TP\n.B {quoted(head)}\n{quoted(' '.join(text.split()) or head)}"


def verbatim(text: str) -> str:
    return f".PP\n.nf\n{quoted(text.rstrip())}\n.fi"


def page(name: str, number: int, about: str, parts: list[str]) -> str:
    made = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", "0"))))
    head = f'.TH {name.upper().replace("-", chr(92) + "-")} {number} {made} "Ebbtide {__version__}"'
    return "\n".join([head, section("NAME", f"{quoted(name)} \\- {quoted(about.strip().rstrip('.'))}"), *parts]) + "\n"


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The options of a parser, then its commands with theirs."""
    formatter = parser._get_formatter()
    commands: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands += action.choices.items()
        elif action.help != argparse.SUPPRESS:
            words = formatter._format_action_invocation(action)
            yield listed(words, formatter._expand_help(action) if action.help else "")
    for name, command in commands:
        yield f".SS {quoted(f'{parser.prog} {name}')}\n{quoted(command.description or '')}"
        yield from options(command)


def program(parser: argparse.ArgumentParser, number: int, about: str, *more: str) -> str:
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100)
    examples = re.sub(r"^examples?:\n", "", parser.epilog or "")
    parts = [
        section("SYNOPSIS", f".B {quoted(parser.prog)}", "[\\fIoptions\\fR]"),
        section("DESCRIPTION", quoted(parser.description or "")),
        section("OPTIONS", *options(parser)),
        section("EXAMPLES", verbatim(examples)),
        *more,
    ]
    return page(parser.prog, number, about, parts)


def command_line() -> str:
    """The page of `ebb`: every command with its options."""
    import typer

    from ebbtide.cli.main import ALIASES, COMMANDS, EXIT_CODES, GROUPS, app

    def below(command: Any, path: str) -> Iterator[str]:
        for name, found in getattr(command, "commands", {}).items():
            if not found.hidden:
                yield from below(command.get_command(None, name), f"{path} {name}")
        if not hasattr(command, "commands"):
            yield f".SS {quoted(path)}\n{quoted((command.help or '').split(chr(12))[0].strip())}"
            for parameter in command.params:
                words = ", ".join((*parameter.opts, *parameter.secondary_opts))
                if "--help" not in parameter.opts:
                    shown = words if words.startswith("-") else parameter.name.upper()
                    yield listed(shown, getattr(parameter, "help", None) or "")
            if command.epilog:
                yield verbatim(command.epilog.removeprefix("Example: ").replace("; ", "\n"))

    root = typer.main.get_command(app)
    general = [
        listed(", ".join((*one.opts, *one.secondary_opts)), getattr(one, "help", "") or "") for one in root.params
    ]
    parts = [
        section("SYNOPSIS", ".B ebb", "\\fIcommand\\fR [\\fIoptions\\fR]"),
        section("DESCRIPTION", quoted(f"{len(COMMANDS)} commands; each has a page of its own with --help.")),
        section("OPTIONS", *general),
        section("COMMANDS", *below(root, "ebb")),
        section("IN SHORT", *(listed(f"ebb {short}", f"ebb {words}") for short, words in ALIASES.items())),
        section("EXIT STATUS", *(listed(str(code), meaning) for code, meaning in EXIT_CODES.items())),
        section("FILES", listed("~/.config/ebbtide/contexts.toml", "Managers by name, of `ebb context`.")),
        section("SEE ALSO", ".BR ebb\\-manager (8),", ".BR ebb\\-hostagent (8)"),
    ]
    return page("ebb", 1, GROUPS[""], parts)


def daemon(model: Any, about: str, description: str, examples: str) -> str:
    from ebbtide.rest.options import parser_of

    parser, _ = parser_of(model, description, examples)
    prefix = model.model_config["env_prefix"]
    return program(
        parser, 8, about,
        section(
            "FILES", listed(str(model.file), "The same options, with the same names (token_file is --token-file)."),
            quoted(f"`ebb config example {model.file.stem}` prints one, `ebb config check` checks it."),
        ),
        section("ENVIRONMENT", quoted(f"{prefix}TOKEN_FILE is --token-file, and so on; {prefix}CONFIG is --config. "
                                      "The command line comes before the environment, and that before the file.")),
        section("SIGNALS", listed("SIGTERM, SIGINT", "End; VMs stay as they are."),
                listed("SIGHUP", "Read options, tokens and certificates again.")),
        section("EXIT STATUS", quoted("0: ended by a signal. 1: it could not start. 2: its options cannot be.")),
        section("SEE ALSO", ".BR ebb (1)"),
    )  # fmt: skip


def pages(package: str) -> dict[str, str]:
    if package == "ebbtide-guest":
        import app_adapters.main
        import guestagent.main
        from guestagent.options import FILE, PREFIX

        return {
            "ebb-guestagent.8": program(
                guestagent.main.build_parser(),
                8,
                "Ebbtide's agent inside a guest",
                section("FILES", listed(FILE, "The same options, with the same names (reserve_mib is --reserve-mib).")),
                section("ENVIRONMENT", quoted(f"{PREFIX}RESERVE_MIB is --reserve-mib, and so on.")),
                section("SIGNALS", listed("SIGTERM, SIGINT", "End."), listed("SIGHUP", "Read the options again.")),
            ),
            "ebb-adapter.1": program(app_adapters.main.build_parser(), 1, "makes a service an application of Ebbtide"),
        }
    import cluster_manager.main as manager
    import hostagent.main as hostagent
    from cluster_manager.options import ManagerOptions
    from hostagent.options import HostAgentOptions

    return {
        "ebb.1": command_line(),
        "ebb-manager.8": daemon(
            ManagerOptions, "places VMs on hosts and deflates them", manager.ABOUT, manager.EXAMPLES
        ),
        "ebb-hostagent.8": daemon(
            HostAgentOptions, "deflates and reinflates the VMs of a host", hostagent.ABOUT, hostagent.EXAMPLE
        ),
    }


def main() -> None:
    package, folder = sys.argv[1], Path(sys.argv[2])
    for name, text in pages(package).items():
        place = folder / f"man{name[-1]}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()

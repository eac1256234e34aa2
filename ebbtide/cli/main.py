"""The command `ebb`: its table of commands, which are imported when they are run."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ebbtide.cli.commands.options import TLS_FILES, Interrupted
from ebbtide.cli.output import guard_output, print_error
from ebbtide.errors import EbbError

#: Each command: its words, its function in `ebbtide.cli.commands` (whose docstring is its help), an example.
COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("doctor", "doctor.doctor", "ebb doctor; ebb doctor web --json; ebb doctor --probe-acpi"),
    ("conformance", "conformance.conformance", "ebb conformance http://127.0.0.1:7101 --token-file agent-token"),
    ("guest enable", "guest.enable", "ebb guest enable web"),
    ("health", "cluster.health", "ebb health; ebb health --ready"),
    ("backup", "cluster.backup", "ebb backup /var/backups/ebbtide.backup"),
    ("openapi", "cluster.openapi", "ebb openapi > manager.json"),
    ("hosts", "cluster.hosts", "ebb hosts --state ready"),
    ("host show", "cluster.host", "ebb host show host-a; ebb host host-a --json"),
    ("host invite", "cluster.invite", "ebb host invite; ebb host invite host-b --expires-s 600"),
    ("host revoke", "cluster.revoke", 'ebb host revoke host-b --reason "stolen"'),
    ("forget", "cluster.forget", "ebb forget host-a --lost-vms"),
    ("vms", "vms.vms", "ebb vms --host host-a --priority deflatable"),
    ("vm", "vms.vm", "ebb vm web --json"),
    (
        "create",
        "vms.create",
        "ebb create web --cpu-cores 2 --memory-mib 1024 --minimum-cpu-cores 0.5 --minimum-memory-mib 512",
    ),
    ("delete", "vms.delete", "ebb delete web --dry-run"),
    ("target", "vms.target", "ebb target web --cpu-cores 1.25 --memory-mib 768"),
    ("stop", "lifecycle.stop", "ebb stop web --limit-s 30"),
    ("start", "lifecycle.start", "ebb start web; ebb start web --anywhere --lose-disk"),
    ("resize", "lifecycle.resize", "ebb resize web --cpu-cores 4 --minimum-memory-mib 768"),
    ("migrate", "lifecycle.migrate", "ebb migrate web --host host-b --lose-disk"),
    ("rebalance", "lifecycle.rebalance", "ebb rebalance --dry-run --lasted-s 3600"),
    ("adopt", "lifecycle.adopt", "ebb adopt web --host host-a --minimum-cpu-cores 0.5 --minimum-memory-mib 512"),
    ("release", "lifecycle.release", "ebb release web"),
    ("templates", "lifecycle.templates", "ebb templates host-a"),
    ("explain", "explain.explain", "ebb explain web"),
    ("pause", "modes.pause", 'ebb pause host-a --reason "new disks"'),
    ("resume", "modes.resume", "ebb resume host-a"),
    ("drain", "modes.drain", 'ebb drain host-a --reason "to be replaced"'),
    ("off", "modes.off", "ebb off host-a"),
    ("operations", "records.operations", "ebb operations --kind create --state failed"),
    ("operation", "records.operation", "ebb operation REQUEST-ID --wait-s 20"),
    ("machines", "cluster.machines", "ebb machines --duration-s 3600"),
    ("machine", "cluster.machine", "ebb machine web --duration-s 3600"),
    ("calibration", "cluster.calibration", "ebb calibration; ebb calibration --json"),
    ("core-changes", "records.core_changes", "ebb core-changes --machine web"),
    ("events", "records.events", "ebb events --follow --kind preempted"),
    ("demo", "lab.demo", "ebb demo --lab"),
    (
        "tasks submit",
        "tasks.submit",
        "ebb tasks submit train --cores 2 --duration-s 3600 --restartable -- python train.py",
    ),
    ("tasks list", "tasks.list_tasks", "ebb tasks list --state waiting"),
    ("tasks show", "tasks.show", "ebb tasks show train --json"),
    ("tasks explain", "tasks.explain", "ebb tasks explain train"),
    ("tasks cancel", "tasks.cancel", "ebb tasks cancel train"),
    ("tasks engine", "tasks.engine", "ebb tasks engine"),
    ("tasks acquirer", "tasks.acquirer", "ebb tasks acquirer"),
    ("token new", "access.token_new", "ebb token new --role operator --name ci"),
    ("certificates", "access.certificates", "ebb certificates tls --manager 127.0.0.1 --host host-a=127.0.0.1"),
    ("invite", "access.invite", "ebb invite host-b --key-file /etc/ebbtide/hosts.key"),
    ("config check", "config.check", "ebb config check; ebb config check manager.toml"),
    ("config example", "config.example", "ebb config example hostagent > hostagent.toml"),
    ("epoch", "access.epoch", "ebb epoch; ebb epoch --state-dir /var/lib/ebbtide/agent --reset"),
    ("lab up", "lab.up", "ebb lab up --host host-a=cpu_cores=6,memory_mib=3600"),
    ("lab status", "lab.status", "ebb lab status --json"),
    ("lab down", "lab.down", "ebb lab down"),
    ("sim inputs", "sim.inputs", "ebb sim inputs hpc2n.swf.gz --convert hpc2n.parquet"),
    (
        "sim run",
        "experiments.run",
        "ebb sim run experiments/harvest-series.toml --input vms=azure.csv.gz --set seeds=3",
    ),
    ("sim show", "experiments.show", "ebb sim show results/harvest-series --metric gap_mean_s"),
    (
        "sim compare",
        "experiments.compare",
        "ebb sim compare results/before results/after; ebb sim compare results/harvest-series --axis policy",
    ),
    ("lab image build", "lab.image_build", "ebb lab image build"),
)
#: What the groups of commands are about.
GROUPS = {
    "": "Deflate virtual machines instead of killing them.",
    "lab": "A whole cluster on this machine.",
    "lab image": "The disk image of the lab's guests.",
    "host": "One host: `ebb host NAME` shows it.",
    "guest": "Guests on this machine.",
    "token": "Tokens with roles.",
    "config": "Files of the daemons' options.",
    "tasks": "Long work, run where the cores will stay.",
    "sim": "Traces and simulations.",
}
#: Packages that only some commands need, and the extra that brings them.
_EXTRAS = {"libvirt": "host", "psutil": "host", "scipy": "sim", "numba": "sim", "pyarrow": "sim"}


class LazyGroup(TyperGroup):
    """Group whose own help page is made from `COMMANDS`, without importing the commands in it."""

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | TyperGroup | None:
        found = self.commands.get(cmd_name)
        if found is None or isinstance(found, TyperGroup):
            return found
        if found.callback is not None and hasattr(found.callback, "loads"):
            found = self.commands[cmd_name] = found.callback.loads()
        return found if isinstance(found, TyperCommand) else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # `ebb host NAME` is `ebb host show NAME`.
        if self.name == "host" and args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["show", *args]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = formatter.width - 6 - max(map(len, self.commands))
        rows = [(name, command.get_short_help_str(width)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _load(words: str) -> TyperCommand:
    """Import a command."""
    function, example = next((function, example) for name, function, example in COMMANDS if name == words)
    module, name = function.split(".")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    run = getattr(importlib.import_module(f"ebbtide.cli.commands.{module}"), name)
    alone.command(words.split()[-1], epilog=f"Example: {example}")(run)
    command = typer.main.get_command(alone)
    assert isinstance(command, TyperCommand)
    return command


def _about(function: str) -> str:
    """The first line of a function's docstring, read from its source: importing all commands takes a second."""
    module, name = function.split(".")
    source = _source(module)
    found = re.search(r'^    """(.+?)(?:"""|$)', source[source.index(f"\ndef {name}(") :], re.MULTILINE)
    return found[1] if found is not None else ""


@functools.cache
def _source(module: str) -> str:
    return Path(__file__).with_name("commands").joinpath(f"{module}.py").read_text(encoding="utf-8")


def _placeholder(words: str) -> Any:
    def run() -> None:
        """Never run: `LazyGroup.get_command` loads the command instead."""

    run.loads = lambda: _load(words)  # type: ignore[attr-defined]
    return run


def _tree() -> typer.Typer:
    """The groups with a placeholder for each command."""
    groups: dict[str, typer.Typer] = {}
    for words, about in GROUPS.items():
        groups[words] = typer.Typer(
            name="ebb",
            cls=LazyGroup,
            help=about,
            no_args_is_help=True,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
        )
        if words:
            parent, _, name = words.rpartition(" ")
            groups[parent].add_typer(groups[words], name=name)
    for words, function, _ in COMMANDS:
        parent, _, name = words.rpartition(" ")
        groups[parent].command(name, help=_about(function))(_placeholder(words))
    return groups[""]


app = _tree()


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"ebb {version('ebbtide')}")
        raise typer.Exit


@app.callback()
def connection(
    ca: Annotated[
        Path | None,
        typer.Option("--ca", envvar="EBB_CA", metavar="FILE", help="CA of an https manager; default: the system's."),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", envvar="EBB_CERTIFICATE", metavar="FILE", help="Our certificate, if it asks."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", envvar="EBB_KEY", metavar="FILE", help="The key of --certificate.")
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Deflate virtual machines instead of killing them."""
    TLS_FILES.set((ca, certificate, key))


def main() -> None:
    """Run a command; what fails ends with 1 and one sentence on stderr, a wrong call with 2, Ctrl-C with 130."""
    guard_output()
    code = _guarded(app)
    # What is still to be written fails here, not when the interpreter ends.
    sys.exit(_guarded(sys.stdout.flush) or code)


def _guarded(work: Callable[[], object]) -> int:
    try:
        work()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except EbbError as error:
        print_error(str(error))
        return 130 if isinstance(error, Interrupted) else 1
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        print_error(f"this needs the package {error.name}: pip install 'ebbtide[{_EXTRAS[error.name]}]'")
        return 1
    except TimeoutError:
        print_error("the operation did not end in time; it goes on, see `ebb operations`")
        return 1
    return 0


if __name__ == "__main__":
    main()

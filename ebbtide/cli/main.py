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

from ebbtide.cli.commands.completion import contexts
from ebbtide.cli.commands.options import Interrupted, WrongCall, taken_apart
from ebbtide.cli.managers import CONTEXT, CONTEXT_TYPED, TLS_FILES
from ebbtide.cli.output import guard_output, print_error
from ebbtide.errors import EbbError
from ebbtide.extras import installing

#: Each command: its words, its function in `ebbtide.cli.commands` (whose docstring is its help), an example.
COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("vm list", "vms.vms", "ebb vm list --host host-a -o wide; ebb vm list --sort-by -current.memory_mib --watch"),
    ("vm show", "explain.vm", "ebb vm show web -o yaml"),
    (
        "vm create",
        "vms.create",
        "ebb vm create web --cpu-cores 2 --memory-mib 1024 --minimum-memory-mib 512; ebb vm create -f web.yaml",
    ),
    ("vm label", "vms.label", "ebb vm label web env=prod tier=front old-"),
    ("vm delete", "vms.delete", "ebb vm delete web --dry-run; ebb vm delete web --yes"),
    ("vm start", "lifecycle.start", "ebb vm start web; ebb vm start web --anywhere --lose-disk"),
    ("vm stop", "lifecycle.stop", "ebb vm stop web --limit-s 30"),
    ("vm shrink", "targets.shrink", "ebb vm shrink web --memory-mib 768 --dry-run"),
    ("vm grow", "targets.grow", "ebb vm grow web; ebb vm grow web --cpu-cores 2"),
    ("vm target", "targets.target", "ebb vm target web --cpu-cores 1.25 --memory-mib 768"),
    ("vm resize", "lifecycle.resize", "ebb vm resize web --cpu-cores 4 --minimum-memory-mib 768"),
    ("vm migrate", "lifecycle.migrate", "ebb vm migrate web --host host-b --lose-disk"),
    ("vm explain", "explain.explain", "ebb vm explain web"),
    ("vm history", "records.vm_history", "ebb vm history web; ebb vm history web --from 2026-01-31T12:00 --points 100"),
    ("vm doctor", "doctor.doctor_vm", "ebb vm doctor web; ebb vm doctor web -o json"),
    (
        "vm adopt",
        "lifecycle.adopt",
        "ebb vm adopt web --host host-a --minimum-cpu-cores 0.5 --minimum-memory-mib 512",
    ),
    ("vm release", "lifecycle.release", "ebb vm release web --yes"),
    ("host list", "cluster.hosts", "ebb host list --state ready; ebb host list -o name"),
    ("host show", "cluster.host", "ebb host show host-a -o wide"),
    ("host history", "records.host_history", "ebb host history host-a; ebb host history host-a -o json"),
    ("host label", "cluster.label", "ebb host label host-a rack=r7 old-"),
    ("host invite", "cluster.invite", "ebb host invite; ebb host invite host-b --expires-s 600"),
    ("host uninvite", "cluster.uninvite", "ebb host uninvite"),
    ("host pause", "modes.pause", 'ebb host pause host-a --reason "new disks"'),
    ("host resume", "modes.resume", "ebb host resume host-a"),
    ("host drain", "modes.drain", 'ebb host drain host-a --reason "to be replaced"'),
    ("host config", "modes.config", "ebb host config host-a --steady on; ebb host config host-a --reserve 8"),
    ("host undeflate", "modes.undeflate", "ebb host undeflate host-a"),
    ("host forget", "cluster.forget", "ebb host forget host-a --lost-vms --yes"),
    ("host revoke", "cluster.revoke", 'ebb host revoke host-b --reason "stolen" --yes'),
    ("host templates", "lifecycle.templates", "ebb host templates host-a"),
    ("host epoch", "access.epoch", "ebb host epoch; ebb host epoch --state-dir /var/lib/ebbtide/agent --reset"),
    ("host tokens", "access.host_tokens", "ebb host tokens host-b --key-file /etc/ebbtide/hosts.key"),
    (
        "task submit",
        "tasks.submit",
        "ebb task submit train --cores 2 --duration-s 3600 --restartable -- python /srv/train.py",
    ),
    ("task list", "tasks.list_tasks", "ebb task list --state waiting"),
    ("task show", "tasks.show", "ebb task show train -o json; ebb task show train --wait-s 60"),
    ("task output", "tasks.output", "ebb task output train --follow; ebb task output train --offset -16384"),
    ("task explain", "tasks.explain", "ebb task explain train"),
    ("task cancel", "tasks.cancel", "ebb task cancel train"),
    ("task engine", "tasks.engine", "ebb task engine"),
    ("task acquirer", "tasks.acquirer", "ebb task acquirer"),
    ("machine list", "cluster.machines", "ebb machine list --duration-s 3600"),
    ("machine show", "cluster.machine", "ebb machine show web --duration-s 3600"),
    ("machine changes", "records.core_changes", "ebb machine changes --machine web"),
    ("machine calibration", "cluster.calibration", "ebb machine calibration; ebb machine calibration -o json"),
    ("plan list", "records.operations", "ebb plan list --kind create --state failed"),
    ("plan show", "records.operation", "ebb plan show REQUEST-ID --wait-s 20"),
    ("plan cancel", "records.cancel", "ebb plan cancel REQUEST-ID"),
    ("plan rebalance", "lifecycle.rebalance", "ebb plan rebalance --dry-run --lasted-s 3600"),
    ("event list", "records.events", "ebb event list --vm web; ebb event list --watch --kind preempted"),
    ("top", "cluster.top", "ebb top; ebb top --vms; ebb top --once | less"),
    ("apply", "apply.apply", "ebb apply -f vms.yaml --dry-run; ebb apply -f vms.yaml"),
    ("wait vm", "wait.vm", "ebb wait vm web --for connected --timeout-s 60"),
    ("wait host", "wait.host", "ebb wait host host-a --for ready"),
    ("wait task", "wait.task", "ebb wait task train --for done --timeout-s 3600"),
    (
        "context add",
        "contexts.add",
        "ebb context add prod --manager https://manager:7100 --token-file ~/.config/ebbtide/prod.token --ca ~/ca.pem",
    ),
    ("context list", "contexts.list_contexts", "ebb context list"),
    ("context show", "contexts.show", "ebb context show; ebb context show prod -o json"),
    ("context use", "contexts.use", "ebb context use prod; ebb context use lab"),
    ("context remove", "contexts.remove", "ebb context remove prod"),
    ("health", "cluster.health", "ebb health; ebb health --ready"),
    ("whoami", "cluster.whoami", "ebb whoami"),
    ("doctor", "doctor.doctor", "ebb doctor; ebb doctor --probe-acpi"),
    ("conformance", "doctor.conformance", "ebb conformance http://127.0.0.1:7101 --token-file agent-token"),
    ("demo", "lab.demo", "ebb demo --lab"),
    ("backup", "cluster.backup", "ebb backup /var/backups/ebbtide.backup"),
    ("openapi", "cluster.openapi", "ebb openapi > manager.json"),
    ("certificates", "access.certificates", "ebb certificates tls --manager 127.0.0.1 --host host-a=127.0.0.1"),
    ("ca next", "access.ca_next", "ebb ca next /etc/ebbtide/tls"),
    ("ca show", "access.ca_show", "ebb ca show; ebb ca show -o json"),
    ("ca finish", "access.ca_finish", "ebb ca finish /etc/ebbtide/tls"),
    ("token new", "access.token_new", "ebb token new --role operator --name ci"),
    ("config check", "config.check", "ebb config check; ebb config check manager.toml"),
    ("config example", "config.example", "ebb config example hostagent > hostagent.toml"),
    ("guest enable", "guest.enable", "ebb guest enable web"),
    ("lab up", "lab.up", "ebb lab up --host host-a=cpu_cores=6,memory_mib=3600"),
    ("lab status", "lab.status", "ebb lab status -o json"),
    ("lab down", "lab.down", "ebb lab down"),
    ("lab image build", "lab.image_build", "ebb lab image build"),
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
)
#: The ten commands that are used most, in one word.
ALIASES = {
    "vms": "vm list",
    "hosts": "host list",
    "tasks": "task list",
    "machines": "machine list",
    "plans": "plan list",
    "events": "event list",
    "create": "vm create",
    "delete": "vm delete",
    "target": "vm target",
    "explain": "vm explain",
}
#: What the groups of commands are about.
GROUPS = {
    "": "Deflate virtual machines instead of killing them.",
    "vm": "VMs: their sizes, and their lives.",
    "host": "Hosts, and what they may do.",
    "task": "Long work, run where the cores will stay.",
    "machine": "VMs as machines of tasks: how likely they keep their cores.",
    "plan": "Operations: what was done, is being done, or would be.",
    "event": "What happened, and why.",
    "wait": "Until something is what is wanted.",
    "context": "Managers by name, in a file of yours.",
    "ca": "The cluster's certificate authority, and one that is to follow it.",
    "token": "Tokens with roles.",
    "config": "Files of the daemons' options.",
    "guest": "Guests on this machine.",
    "lab": "A whole cluster on this machine.",
    "lab image": "The disk image of the lab's guests.",
    "sim": "Traces and simulations.",
}
#: With what a command ends.
EXIT_CODES = {
    0: "done, or what was asked for is so",
    1: "it failed, was refused or did not come in time; one sentence on stderr says why",
    2: "a wrong call, or one that destroys something without --yes where nobody can be asked; nothing was done",
    3: "what was named does not exist",
    130: "interrupted by Ctrl-C; an operation that was begun goes on",
}
#: Packages that only some commands need, and the extra that brings them.
_EXTRAS = {"libvirt": "host", "psutil": "host", "scipy": "sim", "numba": "sim", "pyarrow": "sim"}


class LazyGroup(TyperGroup):
    """Group whose own help page is made from `COMMANDS`, in its order, without importing the commands in it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if "certificates" in self.commands:
            # Of the program itself: Typer puts groups last.
            names = [*(words.split()[0] for words, _, _ in COMMANDS), *ALIASES]
            self.commands = {name: self.commands[name] for name in names}

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | TyperGroup | None:
        found = self.commands.get(cmd_name)
        if found is None or isinstance(found, TyperGroup):
            return found
        if found.callback is not None and hasattr(found.callback, "loads"):
            found = self.commands[cmd_name] = found.callback.loads()
        return found if isinstance(found, TyperCommand) else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        seen = {name: command for name, command in self.commands.items() if not command.hidden}
        width = formatter.width - 6 - max(map(len, seen))
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(width)) for name, command in seen.items()])
        if len(seen) < len(self.commands):
            with formatter.section("In short"):
                formatter.write_dl([(f"ebb {short}", f"ebb {words}") for short, words in ALIASES.items()])


def _load(words: str) -> TyperCommand:
    """Import a command."""
    function, example = next((function, example) for name, function, example in COMMANDS if name == words)
    module, name = function.split(".")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    run = getattr(importlib.import_module(f"ebbtide.cli.commands.{module}"), name)
    alone.command(words.split()[-1], epilog=f"Example: {example}")(taken_apart(run))
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
    for short, words in ALIASES.items():
        groups[""].command(short, hidden=True)(_placeholder(words))
    return groups[""]


app = _tree()


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"ebb {version('ebbtide')}")
        raise typer.Exit


@app.callback()
def connection(
    call: typer.Context,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            envvar="EBB_CONTEXT",
            metavar="NAME",
            help="The manager of this context; default: the one that `ebb context use` chose.",
            autocompletion=contexts,
        ),
    ] = None,
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
    CONTEXT.set(context)
    source = call.get_parameter_source("context")
    # By its name: the class is in click, or in a copy of it that Typer has.
    CONTEXT_TYPED.set(source is not None and source.name == "COMMANDLINE")


def main() -> None:
    """Run a command; what fails ends with one sentence on stderr, and with one of `EXIT_CODES`."""
    guard_output()
    code = _guarded(app)
    # What is still to be written fails here, not when the interpreter ends.
    sys.exit((sys.stdout is not None and _guarded(sys.stdout.flush)) or code)


def exit_code_of(error: EbbError) -> int:
    """With which of `EXIT_CODES` a command ends that fails with this."""
    match error:
        case Interrupted():
            return 130
        case WrongCall():
            return 2
        case _:
            from ebbtide.messages.problem_codes import ProblemCode

            # The manager's answer, or a context's: it is not there. A path that is not there is no manager's, and a
            # task that has not begun is there.
            lost = getattr(error, "code", None) in (ProblemCode.NO_SUCH_ROUTE, ProblemCode.NO_OUTPUT)
            return 3 if getattr(error, "status", None) == 404 and not lost else 1


def _guarded(work: Callable[[], object]) -> int:
    try:
        work()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except EbbError as error:
        print_error(str(error))
        return exit_code_of(error)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        print_error(f"this needs the package {error.name}: {installing(_EXTRAS[error.name])}")
        return 1
    except TimeoutError:
        print_error("the operation did not end in time; it goes on, see `ebb plan list`")
        return 1
    except OSError as error:
        # A full disk, say, or a file that is gone.
        print_error(": ".join(str(word) for word in (error.filename, error.strerror or error) if word is not None))
        return 1
    return 0


if __name__ == "__main__":
    main()

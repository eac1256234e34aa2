"""The command `ebb`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from ebb.commands import (
    access,
    bench,
    cluster,
    doctor,
    experiments,
    explain,
    lab,
    lifecycle,
    modes,
    records,
    sim,
    tasks,
    vms,
)
from ebb.errors import EbbError
from ebb.lab.errors import LabError
from ebb.output import print_error
from simulator.errors import SimulatorError

app = typer.Typer(
    name="ebb",
    help="Deflate virtual machines instead of killing them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.callback()(access.connection)


def _group(parent: typer.Typer, name: str, what: str) -> typer.Typer:
    """A group of commands."""
    made = typer.Typer(help=what, no_args_is_help=True, rich_markup_mode=None)
    parent.add_typer(made, name=name)
    return made


lab_app = _group(app, "lab", "A whole cluster on this machine.")
image_app = _group(lab_app, "image", "The disk image of the lab's guests.")
token_app = _group(app, "token", "Tokens with roles.")
tasks_app = _group(app, "tasks", "Long work, run where the cores will stay.")
sim_app = _group(app, "sim", "Traces and simulations.")

#: Where each command stands, what runs it, and an example for its help page.
COMMANDS: tuple[tuple[typer.Typer, str, Callable[..., None], str], ...] = (
    (app, "doctor", doctor.doctor, "ebb doctor; ebb doctor web --json; ebb doctor --probe-acpi"),
    (app, "health", cluster.health, "ebb health; ebb health --ready"),
    (app, "openapi", cluster.openapi, "ebb openapi > manager.json"),
    (app, "hosts", cluster.hosts, "ebb hosts --state ready"),
    (app, "host", cluster.host, "ebb host host-a --json"),
    (app, "forget", cluster.forget, "ebb forget host-a --lost-vms"),
    (app, "vms", vms.vms, "ebb vms --host host-a --priority deflatable"),
    (app, "vm", vms.vm, "ebb vm web --json"),
    (
        app,
        "create",
        vms.create,
        "ebb create web --cpu-cores 2 --memory-mib 1024 --minimum-cpu-cores 0.5 --minimum-memory-mib 512",
    ),
    (app, "delete", vms.delete, "ebb delete web --dry-run"),
    (app, "target", vms.target, "ebb target web --cpu-cores 1.25 --memory-mib 768"),
    (app, "stop", lifecycle.stop, "ebb stop web --limit-s 30"),
    (app, "start", lifecycle.start, "ebb start web; ebb start web --anywhere --lose-disk"),
    (app, "resize", lifecycle.resize, "ebb resize web --cpu-cores 4 --minimum-memory-mib 768"),
    (app, "migrate", lifecycle.migrate, "ebb migrate web --host host-b --lose-disk"),
    (app, "adopt", lifecycle.adopt, "ebb adopt web --host host-a --minimum-cpu-cores 0.5 --minimum-memory-mib 512"),
    (app, "release", lifecycle.release, "ebb release web"),
    (app, "templates", lifecycle.templates, "ebb templates host-a"),
    (app, "explain", explain.explain, "ebb explain web"),
    (app, "pause", modes.pause, 'ebb pause host-a --reason "new disks"'),
    (app, "resume", modes.resume, "ebb resume host-a"),
    (app, "drain", modes.drain, 'ebb drain host-a --reason "to be replaced"'),
    (app, "off", modes.off, "ebb off host-a"),
    (app, "operations", records.operations, "ebb operations --kind create --state failed"),
    (app, "operation", records.operation, "ebb operation REQUEST-ID --wait-s 20"),
    (app, "machines", cluster.machines, "ebb machines --duration-s 3600"),
    (app, "machine", cluster.machine, "ebb machine web --duration-s 3600"),
    (app, "calibration", cluster.calibration, "ebb calibration; ebb calibration --json"),
    (app, "core-changes", records.core_changes, "ebb core-changes --machine web"),
    (app, "events", records.events, "ebb events --follow --kind preempted"),
    (app, "demo", lab.demo, "ebb demo --lab"),
    (app, "bench", bench.bench, "ebb bench policies"),
    (
        tasks_app,
        "submit",
        tasks.submit,
        "ebb tasks submit train --cores 2 --duration-s 3600 --restartable -- python train.py",
    ),
    (tasks_app, "list", tasks.list_tasks, "ebb tasks list --state waiting"),
    (tasks_app, "show", tasks.show, "ebb tasks show train --json"),
    (tasks_app, "explain", tasks.explain, "ebb tasks explain train"),
    (tasks_app, "cancel", tasks.cancel, "ebb tasks cancel train"),
    (tasks_app, "engine", tasks.engine, "ebb tasks engine"),
    (tasks_app, "acquirer", tasks.acquirer, "ebb tasks acquirer"),
    (token_app, "new", access.token_new, "ebb token new --role operator --name ci"),
    (
        app,
        "certificates",
        access.certificates,
        "ebb certificates tls --manager 127.0.0.1 --host host-a=127.0.0.1",
    ),
    (lab_app, "up", lab.up, "ebb lab up --host host-a=cpu_cores=6,memory_mib=3600"),
    (lab_app, "status", lab.status, "ebb lab status --json"),
    (lab_app, "down", lab.down, "ebb lab down"),
    (sim_app, "inputs", sim.inputs, "ebb sim inputs hpc2n.swf.gz --convert hpc2n.parquet"),
    (
        sim_app,
        "run",
        experiments.run,
        "ebb sim run experiments/harvest-series.toml --input vms=azure.csv.gz --set seeds=3",
    ),
    (sim_app, "show", experiments.show, "ebb sim show results/harvest-series --metric gap_mean_s"),
    (
        sim_app,
        "compare",
        experiments.compare,
        "ebb sim compare results/before results/after; ebb sim compare results/harvest-series --axis policy",
    ),
    (image_app, "build", lab.image_build, "ebb lab image build"),
)

for _where, _name, _function, _example in COMMANDS:
    _where.command(_name, epilog=f"Example: {_example}")(_function)


def main() -> None:
    """Run a command; what fails ends with 1 and one sentence on stderr, a wrong call with 2."""
    try:
        app()
    except (EbbError, LabError, SimulatorError) as error:
        print_error(str(error))
        sys.exit(1)
    except TimeoutError:
        print_error("the operation did not end in time; it goes on, see `ebb operations`")
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The command `make bench NAME=cascade`, or `python -m benchmarks cascade`: figures into benchmarks/results."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from app_adapters.errors import AdapterError
from benchmarks.passes import LEAST_RUNS, Pass
from benchmarks.runner import ALL, run, write
from ebbtide.cli.output import Steps, print_error, print_json, print_table
from ebbtide.errors import EbbError
from hostagent.errors import HostAgentError

QUOTED = Path("benchmarks/results")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def bench(
    name: Annotated[str | None, typer.Argument(help=f"One of: {', '.join(ALL)}; default: all.")] = None,
    output: Annotated[Path | None, typer.Option(help=f"Directory for NAME.json; default: {QUOTED}.")] = None,
    runs: Annotated[
        int, typer.Option(min=1, help="Measurements of each thing; under 5, nothing to quote: with --output only.")
    ] = LEAST_RUNS,
    quick: Annotated[bool, typer.Option("--quick", help="Small and short, not to quote: with --output only.")] = False,
    vm_mib: Annotated[
        float | None, typer.Option(min=1024, help="Size of the large VM of `latency`; default: half of the host.")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="Part of `spark`, once for each; what it measured before is kept.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Run benchmarks and write NAME.json with medians, each a ratio within one run."""
    if name is not None and name not in ALL:
        raise typer.BadParameter(f"there is no benchmark {name}; there are {', '.join(ALL)}")
    if output is None and (quick or runs < LEAST_RUNS):
        raise typer.BadParameter(f"--quick, or fewer than {LEAST_RUNS} runs, needs --output: {QUOTED} is quoted")
    output = output or QUOTED
    results, failed = [], []
    with Steps() as steps:
        how = Pass(runs=runs, quick=quick, report=steps, output=output, vm_mib=vm_mib, parts=tuple(part or ()))
        for chosen in [name] if name is not None else ALL:
            steps(f"running {chosen}")
            try:
                results.append(run(chosen, how))
            except (EbbError, AdapterError, HostAgentError, OSError, subprocess.SubprocessError) as error:
                print_error(f"{chosen}: {error}")
                failed.append(chosen)
                continue
            path = write(results[-1], output)
            steps(f"{path} is written")
    if json:
        print_json(results)
    else:
        print_table(
            ("benchmark", "figure", "value", "unit", "of"),
            (
                (result["name"], key, f"{figure['value']:.3g}", figure["unit"], figure["of"])
                for result in results
                for key, figure in result["figures"].items()
            ),
            "nothing was measured",
        )
    if failed:
        print_error(f"failed: {', '.join(failed)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")

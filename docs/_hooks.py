"""Pages of the site that are made from the code and from the results of runs, when `make docs` builds it.

Nothing of them is written by hand: the commands come from the Typer application, the options from the daemons' own
parsers, the routes from the OpenAPI documents, the figures from the files in benchmarks/results.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic_core import PydanticUndefined

import app_adapters.main
import cluster_manager.main
import guestagent.main
import hostagent.main
from cluster_manager.options import ManagerOptions
from ebbtide.cli.main import ALIASES, EXIT_CODES, app
from ebbtide.rest.options import DaemonOptions
from hostagent.options import HostAgentOptions

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks/results"
#: More figures than these are folded away below the table of a benchmark.
SHOWN: Final = 24
MADE: Final = "*Made by `docs/_hooks.py` from {}.*\n"
#: Measured with real guests, which are emulated; all others have none.
GUESTS: Final = (
    "cascade", "cold", "cpu", "idle", "latency", "levels", "metrics-agent", "steady", "throughput",
)  # fmt: skip
#: File, figure, what it says, and its aim, if it has one: "<" at most, ">" at least, and of whom.
HIGHLIGHTS: Final = (
    ("placement", "interval_placement_p50_ms", "a placement over HTTP while 2,000 hosts report every 2 s", "< 60"),
    ("placement", "reported_placement_p50_ms", "the same while they report as fast as they are answered", "< 120"),
    ("cascade", "two_vms_apart_to_one", "two real guests at once, each with a core of its own, beside one", "< 1.15"),
    ("cascade", "two_vms_to_one", "two real guests deflated at once on two cores, beside one", "< 1.15"),
    ("cascade", "busy_to_quiet", "one beside two busy loops, to the same without", "< 2.5"),
    ("cascade", "side_by_side_64_vms", "64 VMs in one reclaim, each call of libvirt takes 1 s, beside one VM", "< 1.5"),
    ("cascade", "loop_stall_ms", "longest stall of the agent's event loop in a deflation", ""),
    ("cascade", "virtio_mem_mib_s", "memory taken by virtio-mem alone", ""),
    ("cascade", "balloon_mib_s", "memory taken by the balloon alone (Proxmox's rule gives 10 MiB/s)", ""),
    ("latency", "with_application_50_s", "half of the memory of a VM of 2 GiB, with its application", ""),
    ("latency", "without_application_50_s", "the same without the application, by swap on a fast disk", ""),
    ("latency", "without_to_with_50", "without the application, to with it", "> 2 (the paper, Fig. 8b)"),
    ("latency", "with_application_50_to_slower_alone", "with it, to the slower of memcached and virtio-mem", "< 1.1"),
    ("latency", "with_application_50_to_virtio_mem", "speed with it, to virtio-mem's beside an empty cache", ""),
    ("idle", "agent_cpu_20_vms", "CPU of the agent with 20 settled VMs", "< 0.5"),
    ("idle", "agent_cpu_200_simulated_vms", "the same with 200 simulated ones", "< 2"),
    ("idle", "agent_resident_20_vms", "resident memory of the agent with 20 settled VMs", "< 60"),
    ("burst", "own_p99_ms_with_to_without", "p99 under a quota with CPU bursts, beside without", ""),
    ("burst", "fixed_loses_to_harvest", "what a fixed VM loses of a CPU to a harvest VM", "< 2"),
    ("cpu", "quota_50", "a parallel compile on half of the CPU: by quota", ""),
    ("cpu", "off_lining_50", "the same by CPUs off line", ""),
    ("cpu", "both_50", "the same by both (four emulated vCPUs are slower than one on two cores: not comparable)", ""),
    (
        "together", "memcached_50", "memcached with half of its CPU, memory and reads at once, to undeflated",
        "> 0.7 (the paper, Fig. 1)",
    ),
    ("together", "compile_50", "a compile with the same", "> 0.7 (the paper, Fig. 1)"),
    (
        "throughput", "total", "memcached beside a batch VM deflated by half, both rates together",
        "> 1.8 (the paper, Fig. 8a)",
    ),
    (
        "memcached", "application_to_hypervisor_zipf_4k_50_5000_stores",
        "memcached with half of its footprint, swap at 5,000 reads/s, misses fetched in 2 ms: values a second "
        "with the application, to without", "",
    ),
    ("memcached", "shrink_seconds", "1 GiB taken from memcached", ""),
    ("memcached", "shrink_during_get_p99_ms", "p99 of its gets meanwhile", ""),
    ("jvm", "follows_to_stays_50_mean", "mean response time of a JVM whose heap and cache follow to one half", ""),
    ("simulator", "jobs_14000000_s", "14 million jobs in the job simulator, without its loading and their making", ""),
    ("simulator", "plain_1000000_to_simulator", "a plain Python loop, a million jobs, without loading", "> 25"),
    ("matcher", "round_1000_1000_per_s", "decisions of the match maker in a round of 1,000 tasks, 1,000 machines", ""),
    ("matcher", "plain_1000_to_round_1000", "a plain Python loop of Algorithm 1, to that", "> 50"),
    ("matcher", "plain_1000_to_moved", "the same to a decision 10 ms after the one before", "> 50"),
)  # fmt: skip


def cell(text: object) -> str:
    """Text as one cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(value) for value in line) + " |" for line in lines) + "\n"


def number(value: float) -> str:
    """A figure with three significant digits, and none behind the point from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def parameters(command: Any) -> Iterator[tuple[object, ...]]:
    """The arguments and options of a command of Typer's."""
    for parameter in command.params:
        shown = ", ".join((*parameter.opts, *parameter.secondary_opts))
        name = shown if shown.startswith("-") else str(parameter.name).upper()
        if "--help" not in parameter.opts and not getattr(parameter, "hidden", False):
            default = parameter.default
            plain = isinstance(default, (int, float, str)) and not isinstance(default, bool) and default != ""
            yield f"`{name}`", getattr(parameter, "help", None) or "", f"`{default}`" if plain else ""


def commands(command: Any, path: str, depth: int) -> Iterator[str]:
    """One command with its options, then those below it."""
    inner = getattr(command, "commands", {})
    yield f"{'#' * depth} `{path}`\n"
    yield (command.help or "").split("\f")[0].split("\n:param")[0].strip() + "\n"
    if command.epilog:
        shown = command.epilog.removeprefix("Example: ").split("; ")
        yield "```sh\n" + "\n".join(shown) + "\n```\n"
    rows = list(parameters(command))
    if rows:
        yield table(("argument or option", "meaning", "default"), rows)
    for name, found in inner.items():
        if not found.hidden:
            # Asked for: a command's module is imported when it is.
            yield from commands(command.get_command(None, name), f"{path} {name}", min(depth + 1, 3))


def cli() -> str:
    """The page of the commands."""
    made = "\n".join(commands(typer.main.get_command(app), "ebb", 2))
    short = table(("in short", "is"), [(f"`ebb {word}`", f"`ebb {words}`") for word, words in ALIASES.items()])
    codes = table(("exit code", "meaning"), list(EXIT_CODES.items()))
    return (
        f"# Commands\n\n{MADE.format('the Typer application in `ebbtide/cli/main.py`')}\n"
        "How they print, which manager they ask and what scripts should know: [command line](command-line.md).\n\n"
        f"{short}\n{codes}\n{made}"
    )


def daemon_options(model: type[DaemonOptions]) -> str:
    """The options of a daemon that reads them from a file and the environment, too."""
    rows: list[tuple[object, ...]] = []
    for key, described in model.model_fields.items():
        default = "" if described.default in (None, (), PydanticUndefined) else f"`{described.default}`"
        meaning = ("**needed**; " if described.is_required() else "") + (described.description or "")
        rows.append((f"`--{key.replace('_', '-')}`", f"`{key}`", meaning, default))
    return table(("option", "key in the file", "meaning", "default"), rows)


def options(parser: argparse.ArgumentParser) -> str:
    """The options of a program."""
    rows: list[tuple[object, ...]] = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, (argparse._HelpAction, argparse._VersionAction)):
            continue
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        formatter = parser._get_formatter()
        text = formatter._expand_help(action) if action.help else ""
        rows.append((f"`{names}`", ("**needed**; " if action.required and action.option_strings else "") + text))
    return table(("option", "meaning"), rows)


def configuration() -> str:
    """The page of the daemons' options."""
    parts = ["# Configuration\n", MADE.format("the daemons' own options")]
    parts.append(
        "The daemons are configured by options; secrets are read from files that the options name. The manager's "
        "engine file (tasks, prediction, the acquirer) is described in [tasks](tasks.md#settings) and "
        "[acquirer](acquirer.md). The names of the access options are the same for manager and host agent: "
        "[security](security.md).\n"
    )
    parts.append(
        "An option of manager and host agent comes from the command line, else from the environment "
        "(`EBB_MANAGER_TOKEN_FILE`, `EBB_HOSTAGENT_TOKEN_FILE`), else from a TOML file (`--config`; "
        "`/etc/ebbtide/manager.toml`, `/etc/ebbtide/hostagent.toml`). `ebb config example manager` prints such a "
        "file, `ebb config check` says what is wrong in one, by line and key. What may be given again is an array in "
        "the file, and has commas in the environment. `ebb-guestagent` reads `/etc/ebbtide/guestagent.toml` (lines "
        "`key = value` and comments, no arrays and no tables) and `EBB_GUESTAGENT_...` likewise; `ebb-guestagent "
        "--example-config` and `--check-config` are for its file.\n"
    )
    for model, about in ((ManagerOptions, cluster_manager.main.ABOUT), (HostAgentOptions, hostagent.main.ABOUT)):
        parts.append(f"## `{model.program}`\n\n{about}\n\n{daemon_options(model)}")
    parser = guestagent.main.build_parser()
    parts.append(f"## `ebb-guestagent`\n\n{parser.description}\n\n{options(parser)}")
    parser = app_adapters.main.build_parser()
    parts.append(f"## `ebb-adapter`\n\n{parser.description}\n\nEvery adapter has the first five options.\n")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                parts.append(f"### `ebb-adapter {name}`\n\n{options(below)}")
    return "\n".join(parts)


def routes(name: str, title: str) -> str:
    """The page of a daemon's routes."""
    document = json.loads((ROOT / "docs/openapi" / f"{name}.json").read_text(encoding="utf-8"))
    source = f"the OpenAPI 3.1 document [{name}.json](../openapi/{name}.json)"
    parts = [f"# {title}\n", MADE.format(source), f"{document['info']['summary']}\n"]
    grouped: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            grouped.setdefault(route["tags"][0], []).append((method.upper(), path, route))
    for tag, found in grouped.items():
        parts.append(f"## {tag}\n")
        rows: list[tuple[object, ...]] = []
        for method, path, route in found:
            given = ", ".join(f"`{each['name']}`" for each in route.get("parameters", ()) if each.get("in") == "query")
            answers = ", ".join(sorted(route["responses"]))
            rows.append((f"`{method} {path}`", route["summary"], given, body_of(route), answers))
        parts.append(table(("route", "what", "query", "body", "answers"), rows))
    parts.append("## Bodies\n")
    for schema, described in document.get("components", {}).get("schemas", {}).items():
        if "properties" in described:
            parts.append(f"### {schema}\n")
            if described.get("description"):
                parts.append(cell(re.split(r"\n\s*:param", described["description"])[0]) + "\n")
            needed = described.get("required", ())
            fields = [
                (f"`{field}`", kind(what), "yes" if field in needed else "", what.get("description", ""))
                for field, what in described["properties"].items()
            ]
            parts.append(table(("field", "type", "required", "meaning"), list(fields)))
    return "\n".join(parts)


def body_of(route: dict[str, Any]) -> str:
    """The name of a route's request body."""
    content = route.get("requestBody", {}).get("content", {})
    return ", ".join(kind(each["schema"]) for each in content.values())


def kind(schema: dict[str, Any]) -> str:
    """The type of a field in a word or two."""
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[-1])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(kind(each) for each in schema[key]))
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}))}"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    return f"`{schema['const']}`" if "const" in schema else str(schema.get("type", "any"))


def figures(found: dict[str, Any]) -> str:
    """The figures of one benchmark as a table."""
    rows: list[tuple[object, ...]] = []
    for name, figure in found.items():
        runs = figure["runs"]
        spread = f"{number(min(runs))} to {number(max(runs))}" if len(runs) > 1 else ""
        rows.append((f"`{name}`", number(figure["value"]), spread, figure["unit"], figure["of"]))
    return table(("figure", "median", "least to most", "unit", "beside, or of"), rows)


def aimed(value: float, aim: str) -> str:
    """An aim in words, and whether the figure meets it."""
    if not aim:
        return ""
    sign, bound, *source = aim.split(" ", 2)
    met = value <= float(bound) if sign == "<" else value >= float(bound)
    words = " ".join([{"<": "at most", ">": "at least"}[sign], bound, *source])
    return f"{words}: {'met' if met else '**missed**'}"


def results() -> str:
    """The page of measured figures."""
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    if quick := [name for name, document in files.items() if document.get("quick")]:
        raise ValueError(f"{', '.join(quick)}: a quick pass, or one of too few runs, is not to be quoted")
    parts = ["# Results\n", MADE.format("the files in `benchmarks/results`, which `make bench` writes")]
    parts.append(
        "Medians, with the least and the most of the runs beside them; how each is measured stands in "
        f"[Benchmarks](benchmarks.md). All of it is measured on two cores. {', '.join(GUESTS)} have guests, which are "
        "emulated; the others have none and run natively. Compare ratios, not seconds.\n"
    )
    chosen: list[tuple[object, ...]] = []
    for file, name, what, aim in HIGHLIGHTS:
        figure = files.get(file, {}).get("figures", {}).get(name)
        if figure is not None:
            unit = "times" if figure["unit"] == "ratio" else figure["unit"]
            count = f"{min(figure['runs']):.3g} to {max(figure['runs']):.3g}"
            chosen.append(
                (what, f"{number(figure['value'])} {unit}", count, aimed(figure["value"], aim), f"[{file}](#{file})")
            )
    parts += ["## In short\n", table(("what", "median", "least to most", "aim", "benchmark"), chosen)]
    parts.append(
        "An aim stands where there is one, ours or the paper's (Sharma et al. 2019), and the median decides. Where the "
        "paper's set-up differs too much for that, [Deflation, claim by claim](deflation.md) says so. Besides: "
        "matching on a real Slurm ends tasks no sooner than Slurm's own choice of the least loaded node. **Withdrawn** "
        "until they are measured again: `als_crossover` of Spark and what it is made of; what an idle agent takes to "
        "what it took before there were metrics, `agent_to_before`; and what deflation does to a compile's p99, "
        "`compile_p99` of `cold`; for good: the agent's time to that of the same calls bare "
        "([Benchmarks](benchmarks.md) says why).\n"
    )
    for name, document in files.items():
        machine, found = document["machine"], document["figures"]
        parts.append(f"## {name}\n")
        # Runs that are kept one by one are of more than one day.
        days = " to ".join(date[:10] for date in (document.get("since"), document["date"]) if date)
        runs = statistics.mode(len(figure["runs"]) for figure in found.values())
        beside = document.get("beside") or {}
        told = "; beside it {mean_cores} cores of other work, {most_cores} at most".format(**beside) if beside else ""
        parts.append(
            f"{days}, version {document['version']}, {machine['cpus']} cores ({machine['cpu']}), "
            f"{machine['memory_mib'] / 1024:.1f} GiB, {runs} runs{told}; `make bench NAME={name}` measures it again.\n"
        )
        shown = figures(found)
        if len(found) > SHOWN:
            inside = "".join(f"    {line}\n" for line in shown.splitlines())
            shown = f'??? note "{len(found)} figures"\n\n{inside}'
        parts.append(shown)
    return "\n".join(parts)


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0]


def modules() -> str:
    """The page of all modules that are installed, by rooms."""
    parts = ["# Modules\n", MADE.format("the first paragraph of each module's docstring")]
    parts.append("What each room is for: [architecture](architecture.md).\n")
    for program in ("ebbtide", "hostagent", "guestagent", "app_adapters", "cluster_manager"):
        parts.append(f"## {program}\n")
        for package in sorted(path.parent for path in (ROOT / program).rglob("__init__.py")):
            name = package.relative_to(ROOT).as_posix()
            rows: list[tuple[object, ...]] = [
                (f"`{path.stem}`", summary(path)) for path in sorted(package.glob("*.py")) if path.stem != "__init__"
            ]
            parts.append(f"### {name}/\n\n{cell(summary(package / '__init__.py'))}\n")
            if rows:
                parts.append(table(("module", "what it is"), rows))
    return "\n".join(parts)


PAGES: Final = {
    "internals/modules.md": modules,
    "reference/cli.md": cli,
    "reference/configuration.md": configuration,
    "reference/rest-manager.md": lambda: routes("manager", "Routes of the manager"),
    "reference/rest-hostagent.md": lambda: routes("hostagent", "Routes of the host agent"),
    "research/results.md": results,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made; called by MkDocs."""
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files

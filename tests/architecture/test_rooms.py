"""The rules of docs/internals/architecture.md that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("ebbtide", "hostagent", "guestagent", "cluster_manager", "app_adapters", "benchmarks")
PURE = ("ebbtide/deflation", "ebbtide/matcher")
IN_GUESTS = ("guestagent", "app_adapters")
LONGEST_FILE = 600
MOST_MODULES = 20
#: Modules that read a clock, wait, draw lots or touch the machine.
IMPURE = {
    "asyncio",
    "concurrent",
    "datetime",
    "io",
    "libvirt",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "select",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
#: Builtins and attributes that do the same without an import.
IMPURE_CALLS = {
    "open",
    "input",
    "print",
    "now",
    "utcnow",
    "today",
    "monotonic",
    "perf_counter",
    "seed",
    "rand",
    "randn",
}


def python_files(*rooms: str) -> Iterator[Path]:
    for room in rooms:
        yield from sorted((ROOT / room).rglob("*.py"))


def pure_files(room: str) -> Iterator[Path]:
    """Decisions: all of the room but what drives real schedulers."""
    return (path for path in python_files(room) if path.parent != ROOT / "ebbtide/matcher/engines")


def tree(path: Path, feature_version: tuple[int, int] | None = None) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=feature_version)


def imported(module: ast.Module) -> Iterator[str]:
    """Top-level names of all that a module imports, also inside functions."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.split(".")[0]


def test_import_contracts_are_kept() -> None:
    # The command itself, as `make lint` runs it; beside the interpreter, so that no other installation answers.
    command = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [str(command), "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize("room", IN_GUESTS)
def test_code_in_guests_is_python_3_8(room: str) -> None:
    paths = list(python_files(room))
    assert paths
    for path in paths:
        module = tree(path, feature_version=(3, 8))
        if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in module.body):
            futures = [n for n in module.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
            assert futures, f"{path}: annotations of newer Pythons are evaluated without the __future__ import"


@pytest.mark.parametrize("room", IN_GUESTS)
def test_code_in_guests_imports_the_standard_library_and_itself(room: str) -> None:
    allowed = sys.stdlib_module_names | {room}
    for path in python_files(room):
        strangers = set(imported(tree(path))) - allowed
        assert not strangers, f"{path} imports {strangers}"


@pytest.mark.parametrize("room", PURE)
def test_decisions_read_no_clock_and_touch_nothing(room: str) -> None:
    for path in pure_files(room):
        module = tree(path)
        assert not set(imported(module)) & IMPURE, path
        for node in ast.walk(module):
            assert not isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.Global), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                assert called not in IMPURE_CALLS, f"{path}:{node.lineno} calls {called}"


def test_no_policy_imports_what_drives_real_schedulers() -> None:
    policies, simulated = list(pure_files("ebbtide/matcher")), list(python_files("ebbtide/simulator"))
    assert policies
    assert simulated
    for path in [*policies, *simulated]:
        for node in ast.walk(tree(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith("ebbtide.matcher.engines") for name in names), path


def test_chance_comes_in_as_a_seeded_generator() -> None:
    """`numpy.random` may be named as a type, and never be drawn from."""
    for path in python_files(*PURE):
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Attribute)
                and node.value.attr == "random"
            ):
                assert node.attr == "Generator", f"{path}:{node.lineno} uses numpy.random.{node.attr}"


def test_the_check_for_purity_can_fail() -> None:
    module = ast.parse("def f():\n    import time\n    from os.path import join\n")
    assert set(imported(module)) & IMPURE == {"time", "os"}


@pytest.mark.parametrize("room", [*ROOMS, "tests"])
def test_no_file_has_grown_too_long(room: str) -> None:
    paths = list(python_files(room))
    long = {str(p.relative_to(ROOT)): n for p in paths if (n := len(p.read_text("utf-8").splitlines())) > LONGEST_FILE}
    assert not long


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "benchmarks"])
def test_every_room_says_that_it_is_typed(room: str) -> None:
    assert (ROOT / room / "py.typed").is_file()


def test_a_host_agent_loads_no_array_library() -> None:
    """It costs every host 11 MiB, and what needs it is the manager's work."""
    code = "import sys, hostagent.main; print(sorted(set(sys.modules) & {'numpy', 'scipy', 'sqlalchemy', 'typer'}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_no_package_has_more_than_twenty_modules_on_one_level() -> None:
    levels = Counter(path.parent for room in ROOMS for path in python_files(room) if path.name != "__init__.py")
    assert not {str(level.relative_to(ROOT)): n for level, n in levels.items() if n > MOST_MODULES}

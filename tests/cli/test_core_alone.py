"""What the wheel's core does without the extras: neither libvirt nor a compiler is needed for manager and commands."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from ebbtide.extras import installing
from ebbtide.lab.state import write_private

#: As `import` answers for a package that is not installed.
EXTRAS = ("libvirt", "libvirt_qemu", "psutil", "scipy", "sklearn", "numba", "pyarrow")
WITHOUT = f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS}))\n"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT + code, *arguments], capture_output=True, text=True)


EBB = "from ebbtide.cli.main import main; main()"


def test_commands_work_without_the_extras() -> None:
    lines = ["--help", "vms --help", "create --help", "tasks submit --help"]
    code = "from ebbtide.cli.main import app\n"
    code += "print([app(line.split(), standalone_mode=False) for line in sys.argv[1:]])"
    found = run(code, *lines)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines()[-1] == f"{[0] * len(lines)}"


def test_the_manager_works_without_the_extras() -> None:
    found = run("import cluster_manager.main as manager; manager.main(['--help'])")
    assert (found.returncode, found.stderr) == (0, "")


#: What takes a quarter of a second and more to import, all in all.
HEAVY = ("aiohttp", "sqlalchemy", "numpy", "rich", "structlog", "libvirt", "psutil", "cluster_manager.manager")


@pytest.mark.parametrize(
    ("code", "arguments", "heavy"),
    [
        (EBB, ("--help",), ()),
        (EBB, ("--version",), ()),
        (EBB, ("create", "--help"), ()),
        (EBB, ("tasks", "submit", "--help"), ()),
        (EBB, ("sim", "run", "--help"), ("rich",)),
        (EBB, ("config", "example", "manager"), ()),
        (EBB, ("config", "example", "hostagent"), ()),
        # It reads the files as the daemon does; for the other daemon's file none of this one's is imported.
        (EBB, ("config", "check", "hostagent.toml"), ("aiohttp", "structlog", "rich", "psutil")),
        (EBB, ("vms", "--manager", "http://127.0.0.1:9", "--token-file", "token"), ("aiohttp",)),
        ("from cluster_manager.main import main; main()", ("--help",), ()),
        ("from hostagent.main import main; main()", ("--help",), ()),
        ("from guestagent.main import main; main()", ("--help",), ()),
    ],
)
def test_a_command_imports_nothing_heavy_that_it_does_not_need(
    tmp_path: Path, code: str, arguments: tuple[str, ...], heavy: tuple[str, ...]
) -> None:
    """`ebb --help` is there in 0.3 s, any command in 0.5 s (measured: docs/internals/tests.md)."""
    (tmp_path / "hostagent.toml").write_text('id = "host-a"\ncapacity = "auto"\ntoken_file = "token"\n')
    write_private(tmp_path / "token", "a-word")
    tell = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=open('modules', 'w')))\n"
    subprocess.run([sys.executable, "-c", tell + code, *arguments], cwd=tmp_path, capture_output=True, check=False)
    loaded = set((tmp_path / "modules").read_text().split())
    assert loaded & set(HEAVY) == set(heavy)


#: What takes a tenth of a second and more, or 30 MiB and more, and is not needed before the first run.
RUNS_ONLY = {"numba", "pyarrow", "scipy", "matplotlib", "aiohttp", "sqlalchemy", "libvirt", "structlog", "benchmarks"}


@pytest.mark.parametrize("name", ["jobs-walk", "waiting", "intervals", "coaster"])
def test_a_simulation_imports_nothing_before_its_cases_are_checked_that_only_its_runs_need(
    tmp_path: Path, name: str
) -> None:
    """0.5 CPU seconds, not 2 (measured: docs/internals/tests.md)."""
    tell = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=open('modules', 'w')))\n"
    file = Path(__file__).parents[2] / "experiments" / f"{name}.toml"
    words = ("sim", "run", str(file), "--set", "colour=1")
    done = subprocess.run([sys.executable, "-c", tell + EBB, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "settings.colour is unknown" in done.stderr
    loaded = set((tmp_path / "modules").read_text().split())
    assert f"ebbtide.simulator.{name.partition('-')[0]}.model" in loaded
    assert not loaded & RUNS_ONLY


@pytest.mark.parametrize("arguments", [("lab", "status"), ("doctor",)])
def test_a_command_that_needs_an_extra_names_it(arguments: tuple[str, ...]) -> None:
    found = run(EBB, *arguments)
    assert found.returncode == 1
    assert installing("host") in found.stderr
    assert "Traceback" not in found.stderr


def test_the_host_agent_names_its_extra() -> None:
    needed = ("--id", "host-a", "--capacity", "auto", "--token-file", "token")
    found = run("from hostagent.__main__ import main; main()", *needed)
    assert (found.returncode, found.stdout) == (1, "")
    assert installing("host") in found.stderr


@pytest.mark.parametrize(
    "code",
    [
        EBB,
        "from cluster_manager.main import main; main()",
        "from hostagent.main import main; main()",
    ],
)
def test_each_command_says_its_version(code: str) -> None:
    found = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True)
    assert found.returncode == 0
    assert found.stdout.split()[-1] == version("ebbtide")


def test_nobody_is_told_to_install_what_anybody_may_have_called_ebbtide() -> None:
    """No index has Ebbtide: whoever registered the name there would be installed, often as root."""
    root = Path(__file__).parents[2]
    files = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    told = re.compile(r"pip install[^\n`]*[ '\"]ebbtide(\[|['\"` \n])")
    found, no_advice = [], ("CHANGELOG.md", "tests/cli/test_core_alone.py")
    for name in filter(None, files.split("\0")):
        if name.endswith((".py", ".md", ".sh", ".yml")) and name not in no_advice:
            found += [(name, one.group()) for one in told.finditer((root / name).read_text(encoding="utf-8"))]
    assert not found


def test_an_extra_is_installed_by_the_names_of_what_it_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installing("certificates") == f"{sys.executable} -m pip install 'cryptography>=42'"
    assert installing("otel").count("opentelemetry") == 2
    assert installing("no-such") == "what the extra no-such lists in pyproject.toml"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert installing("jmx") == f"python3 -m pip --python {sys.executable} install 'jpype1>=1.5'"

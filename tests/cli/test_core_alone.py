"""What the wheel's core does without the extras: neither libvirt nor a compiler is needed for manager and commands."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

#: As `import` answers for a package that is not installed.
EXTRAS = ("libvirt", "libvirt_qemu", "psutil", "scipy", "numba", "pyarrow")
WITHOUT = f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS}))\n"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT + code, *arguments], capture_output=True, text=True)


EBB = "from ebbtide.cli.main import main; main()"


@pytest.mark.parametrize(
    "arguments", [("--help",), ("vms", "--help"), ("create", "--help"), ("tasks", "submit", "--help")]
)
def test_commands_work_without_the_extras(arguments: tuple[str, ...]) -> None:
    found = run(EBB, *arguments)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_manager_works_without_the_extras() -> None:
    found = run("import cluster_manager.main as manager; manager.main(['--help'])")
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [("lab", "status"), ("doctor",)])
def test_a_command_that_needs_an_extra_names_it(arguments: tuple[str, ...]) -> None:
    found = run(EBB, *arguments)
    assert found.returncode == 1
    assert "pip install 'ebbtide[host]'" in found.stderr
    assert "Traceback" not in found.stderr


def test_the_host_agent_names_its_extra() -> None:
    found = run("from hostagent.__main__ import main; main()")
    assert (found.returncode, found.stdout) == (1, "")
    assert "pip install 'ebbtide[host]'" in found.stderr


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

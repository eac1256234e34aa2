"""The command line itself: help pages, wrong calls, errors."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from ebbtide.cli import main
from ebbtide.cli.main import COMMANDS, app
from ebbtide.cli.schemas import DOCUMENTS, schema_of
from ebbtide.errors import EbbError


def environment(state_dir: Path) -> dict[str, str]:
    places = {"EBB_STATE_DIR": str(state_dir), "EBB_CACHE_DIR": str(state_dir / "cache")}
    return {"PATH": "/usr/bin:/bin", "HOME": str(state_dir), **places}


def run(*words: str, state_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ebbtide.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(state_dir),
    )


def test_every_command_has_a_schema_and_every_schema_a_command() -> None:
    assert list(DOCUMENTS) == [words for words, _, _ in COMMANDS]
    for words in DOCUMENTS:
        jsonschema.Draft202012Validator.check_schema(schema_of(words))


def test_the_list_of_commands_says_what_their_functions_say() -> None:
    for words, path, _ in COMMANDS:
        module, name = path.split(".")
        function = getattr(importlib.import_module(f"ebbtide.cli.commands.{module}"), name)
        assert function.__doc__.splitlines()[0] == main._about(path), words


def test_the_list_of_commands_imports_none_of_them() -> None:
    """`ebb --help` answers at once: libraries are imported by the command that needs them."""
    code = (
        "import sys\n"
        "from ebbtide.cli.main import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "heavy = {'aiohttp', 'pydantic', 'rich', 'numpy', 'libvirt', 'ebbtide.lab', 'ebbtide.client', 'hostagent'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "certificates" in result.stdout


@pytest.mark.parametrize(
    "words",
    [["nonsense"], ["vm", "create"], ["vm", "create", "web", "--cpu-cores", "many"], ["host", "list", "--wrong"],
     ["vm", "target", "web"], ["vm", "shrink", "web"], ["machine", "list", "--duration-s", "-1"],
     ["plan", "list", "--limit", "0"], ["health", "-o", "name"]],
    ids=" ".join,
)  # fmt: skip
def test_a_wrong_call_ends_with_2(words: list[str]) -> None:
    assert CliRunner().invoke(app, words).exit_code == 2


def test_without_a_lab_a_command_ends_with_1_and_says_how_to_start_one(tmp_path: Path) -> None:
    result = run("host", "list", state_dir=tmp_path / "none")
    assert result.returncode == 1
    assert result.stdout == ""
    assert "ebb lab up" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("words", ["vms", "vm delete web --yes", "lab status", "demo"])
def test_without_a_lab_no_command_does_anything(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("EBB_", "XDG_"))]:
        monkeypatch.delenv(name)
    result = CliRunner(env=environment(tmp_path / "none")).invoke(app, words.split())
    assert result.stdout == ""
    assert isinstance(result.exception, EbbError)
    assert main.exit_code_of(result.exception) == 1
    assert "ebb lab up" in str(result.exception)


def test_a_manager_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    result = run("host", "list", "--manager", "http://127.0.0.1:9", "--token-file", str(token), state_dir=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("error: no manager answers at http://127.0.0.1:9")
    assert result.stderr.count("\n") == 1


def test_sizes_that_contradict_each_other_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    words = ["vm", "create", "web", "--cpu-cores", "2", "--memory-mib", "1024", "--minimum-memory-mib", "2048"]
    result = run(*words, state_dir=tmp_path / "none")
    assert result.returncode == 1
    assert "minimum.memory_mib" in result.stderr


def test_down_without_a_lab_says_so_and_ends_with_0(tmp_path: Path) -> None:
    result = run("lab", "down", state_dir=tmp_path / "none")
    assert (result.returncode, result.stdout.strip()) == (0, "no lab was up")
    assert not (tmp_path / "none").exists()


def test_doctor_needs_no_libvirt_bindings(tmp_path: Path) -> None:
    """The bindings are hidden from the interpreter; the doctor must name them, not fall over them."""
    code = (
        "import sys, importlib.util, importlib.metadata\n"
        "sys.modules['libvirt'] = None\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'libvirt' else find(name, *a)\n"
        "from ebbtide.cli import doctor\n"
        "facts = {}\n"
        "finding = doctor._bindings(facts, needed=True)\n"
        "assert not finding.ok and 'libvirt-dev' in finding.fix, finding\n"
        "doctor._libvirt(facts, lab=True)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr

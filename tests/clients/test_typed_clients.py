"""Typed clients made from the OpenAPI documents, by generators that others use, against real daemons.

The generators warn of what they leave out: no warning may come. What they make is checked strictly, with a scenario
that is then run.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from ebbtide.rest.credentials import command_token
from tests.manager.cluster import TOKEN
from tests.manager.fake_agent import HOSTS_KEY
from tests.manager.with_agent import lab_of

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ROOT / "tests/clients/scenarios"
NPM = Path(sys.prefix) / "npm/node_modules"
#: With the generator of Python, and what its clients need (scripts/make-venv.sh).
PYTHON = Path(sys.prefix) / "openapi/bin/python"
TSC = ["--strict", "--noUncheckedIndexedAccess", "--module", "nodenext", "--target", "es2022", "--lib", "es2022,dom"]


async def run(*argv: str | Path, cwd: Path, token: str = "") -> str:
    """What a program prints; it must end well."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        env={**os.environ, "TOKEN": token, "NO_COLOR": "1", "PYTHONPATH": str(cwd)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    text = output.decode(errors="replace")
    assert process.returncode == 0, text[-10_000:]
    return text


async def generate_python(name: str, directory: Path) -> None:
    """The package ``generated_NAME`` and its scenario, in a directory."""
    package = directory / f"generated_{name}"
    await generate(ROOT / "docs/openapi" / f"{name}.json", package)
    shutil.copy(SCENARIOS / f"{name}.py", directory / "scenario.py")
    checked: list[str | Path] = [
        "--python-executable",
        PYTHON,
        "--cache-dir",
        directory / "cache",
        package.name,
        "scenario.py",
    ]
    await run(sys.executable, "-m", "mypy", "--strict", *checked, cwd=directory)


async def generate(document: Path, package: Path) -> None:
    """A package for a document; a warning is an error."""
    config = package.with_suffix(".yml")
    # Its formatter is ruff as it is configured wherever it runs, which changes types.
    config.write_text("post_hooks: []")
    options: list[str | Path] = [
        "--path",
        document,
        "--output-path",
        package,
        "--meta",
        "none",
        "--config",
        config,
        "--fail-on-warning",
    ]
    said = await run(PYTHON, "-m", "openapi_python_client", "generate", *options, cwd=package.parent)
    assert "arning" not in said, said


async def generate_typescript(name: str, directory: Path) -> None:
    """``generated_NAME.d.ts`` and its scenario, compiled, in a directory."""
    (directory / "node_modules").symlink_to(NPM)
    (directory / "package.json").write_text('{"type": "module"}')
    document = ROOT / "docs/openapi" / f"{name}.json"
    types = directory / f"generated_{name}.d.ts"
    # What has a default may be left out of a request.
    options: list[str | Path] = ["--default-non-nullable", "false", "-o", types]
    said = await run("node", NPM / "openapi-typescript/bin/cli.js", document, *options, cwd=directory)
    assert "arning" not in said, said
    shutil.copy(SCENARIOS / f"{name}.ts", directory / "scenario.ts")
    await run("node", NPM / "typescript/bin/tsc", *TSC, types.name, "scenario.ts", cwd=directory)


async def test_a_python_client_of_the_manager_is_typed_and_works(tmp_path: Path) -> None:
    await generate_python("manager", tmp_path)
    async with lab_of(tmp_path) as lab:
        await run(PYTHON, "scenario.py", lab.url, cwd=tmp_path, token=TOKEN)


async def test_a_python_client_of_a_host_agent_is_typed_and_works(tmp_path: Path) -> None:
    await generate_python("hostagent", tmp_path)
    await ask_a_host_agent(PYTHON, "scenario.py", tmp_path)


async def test_a_typescript_client_of_the_manager_is_typed_and_works(tmp_path: Path) -> None:
    await generate_typescript("manager", tmp_path)
    async with lab_of(tmp_path) as lab:
        await run("node", "scenario.js", lab.url, cwd=tmp_path, token=TOKEN)


async def test_a_typescript_client_of_a_host_agent_is_typed_and_works(tmp_path: Path) -> None:
    await generate_typescript("hostagent", tmp_path)
    await ask_a_host_agent("node", "scenario.js", tmp_path)


async def ask_a_host_agent(program: str | Path, scenario: str, directory: Path) -> None:
    """Run a scenario against a host agent with one VM."""
    async with lab_of(directory) as lab:
        await lab.create("low")
        url, token = str(lab.agent_server.make_url("")).rstrip("/"), command_token(HOSTS_KEY, "host-a")
        await run(program, scenario, url, cwd=directory, token=token)


@pytest.mark.parametrize("name", ["manager", "hostagent"])
async def test_a_document_with_two_schemas_of_one_title_would_be_seen(name: str, tmp_path: Path) -> None:
    """The generator's own complaint, which the other tests rely on."""
    text = (ROOT / "docs/openapi" / f"{name}.json").read_text().replace('"title": "VectorInput"', '"title": "Vector"')
    document = tmp_path / "broken.json"
    document.write_text(text)
    with pytest.raises(AssertionError, match="arning"):
        await generate(document, tmp_path / "made")

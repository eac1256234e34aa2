"""Modules of one's own: what is made from them is made again when they change."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from ebbtide.simulator import compiling
from ebbtide.simulator.errors import ExperimentError
from ebbtide.simulator.experiments import code, run
from ebbtide.simulator.experiments.shared import shared_arrays
from tests.simulator.experiments.places import OWN, put


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the test's directory can be imported, and are forgotten in the end."""
    monkeypatch.syspath_prepend(tmp_path)
    # Two contents of one length within one second would be one.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if (file := getattr(sys.modules[name], "__file__", None)) and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


def test_the_model_of_the_page_runs_as_it_is_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "experiments.md").read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", page[page.index("A whole one, `dice.py`") :], re.DOTALL)
    (tmp_path / "dice.py").write_text(dict(blocks)["python"])
    (tmp_path / "dice.toml").write_text(dict(blocks)["toml"])
    words = ["ebb", *dict(blocks)["sh"].split()[2:]]
    assert dict(blocks)["sh"].split()[:2] == ["PYTHONPATH=.", "ebb"]
    ours = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    for path, status, sentence in ((".", 0, "20 runs: 20 made"), ("", 1, "PYTHONPATH=. ebb sim run FILE")):
        ended = subprocess.run(
            words, cwd=tmp_path, env=ours | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert ended.returncode == status, ended.stderr
        assert sentence in ended.stdout + ended.stderr


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    # Each content has a time of its own.
    os.utime(path, ns=(0, len(text) * 10**9))
    importlib.invalidate_caches()


def again(module: ModuleType) -> ModuleType:
    return importlib.reload(module)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("own_loops", "from own_factors import F"),
        ("own_loops", "import own_factors"),
        ("own_package.own_loops", "from .own_factors import F"),
        ("own_package.own_loops", "from . import own_factors"),
        ("own_package.own_loops", "from own_package.own_factors import F"),
    ],
)
def test_machine_code_is_made_again_when_a_module_beside_its_own_changes(
    tmp_path: Path, module: str, says: str
) -> None:
    place = tmp_path / module.replace(".", "/")
    write(place.with_name("own_factors.py"), "F = 1\n")
    write(place.with_suffix(".py"), f"{says}\ndef loop(x): return x\n")
    if "." in module:
        write(place.with_name("__init__.py"), "")
    factors = module.replace("own_loops", "own_factors")
    importlib.import_module(module)
    importlib.import_module(factors)
    before = compiling._directory(frozenset([module]))
    write(place.with_name("own_factors.py"), "F = 100\n")
    assert compiling._directory(frozenset([module])) == before, "what runs here is still the old code"
    importlib.reload(sys.modules[factors])
    assert compiling._directory(frozenset([module])) != before


def test_an_import_from_beyond_a_package_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "own_script.py", "try:\n    from .none import F\nexcept ImportError:\n    F = 1\n")
    importlib.import_module("own_script")
    assert code.beside({"own_script"}) == ["own_script"]


def test_prepared_arrays_are_made_again_when_the_module_that_makes_them_or_one_beside_it_changes(
    tmp_path: Path,
) -> None:
    write(tmp_path / "own_factor.py", "F = 1\n")
    text = "import numpy as np, own_factor\ndef make(): return {{'a': np.array([{} * own_factor.F])}}\n"
    write(tmp_path / "own_arrays.py", text.format(1))
    arrays = importlib.import_module("own_arrays")
    assert shared_arrays("x", arrays.make)["a"].tolist() == [1]
    write(tmp_path / "own_arrays.py", text.format(20))
    assert shared_arrays("x", again(arrays).make)["a"].tolist() == [20]
    write(tmp_path / "own_factor.py", "F = 100\n")
    again(sys.modules["own_factor"])
    assert shared_arrays("x", arrays.make)["a"].tolist() == [2000]


def test_old_code_of_a_module_that_has_changed_since_its_import_makes_no_run(tmp_path: Path) -> None:
    """Its outcomes would stand under the name of the new code."""
    write(tmp_path / "own_model.py", OWN)
    file = put(tmp_path, '[experiment]\nname="a"\nmodel="own_model:MODEL"\nseeds=2\n')

    def sweep() -> list[float]:
        values: list[float] = run(file, output=tmp_path / "out", workers=0).columns["m"].tolist()
        return values

    assert sweep() == [1.0, 2.0]
    for text in (OWN + "  (", OWN.replace("float(seed)", "10.0 * seed")):
        write(tmp_path / "own_model.py", text)
        with pytest.raises(ExperimentError, match=r"^model is old code here: .*own_model.py has changed since it was"):
            sweep()
    again(sys.modules["own_model"])
    assert sweep() == [10.0, 20.0]


@pytest.mark.parametrize("library", ["numpy", "scipy", "scikit-learn"])
def test_runs_are_made_again_by_another_version_of_a_library_that_decides_them(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = code.code_fingerprint()
    versions = metadata.version
    code.code_fingerprint.cache_clear()
    try:
        monkeypatch.setattr(metadata, "version", lambda name: "0.1" if name == library else versions(name))
        assert code.code_fingerprint() != before
    finally:
        code.code_fingerprint.cache_clear()

"""Sweeps on a Dask cluster: a real scheduler and a real worker on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import distributed
import numpy as np
import pytest

from ebbtide.simulator.errors import ExperimentError
from ebbtide.simulator.experiments import dask_cluster, run
from tests.simulator.experiments.places import OWN, SWEEP, put

ROOT = Path(__file__).parents[3]
LIMIT_S = 90.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a scheduler with one worker that has a process of its own and no cache of ours."""
    directory = tmp_path_factory.mktemp("dask")
    file = directory / "scheduler.json"
    (directory / "own_alike.py").write_text(OWN)
    (directory / "own_other.py").write_text(OWN)
    environment = os.environ | {"PYTHONPATH": f"{directory}:{ROOT}", "EBB_CACHE_DIR": str(directory / "none")}
    local = ["--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(file)]
    with ExitStack() as stack:
        for words in (
            ["distributed.cli.dask_scheduler", *local, "--port", "0", "--no-jupyter"],
            ["distributed.cli.dask_worker", *local, "--nthreads", "2", "--local-directory", str(directory)],
        ):
            stack.enter_context(_running([sys.executable, "-m", *words], directory, environment))
            _wait_for_file(file)
        found: str = json.loads(file.read_text())["address"]
        # A run waits ten seconds for workers; on a busy machine one takes longer to start.
        with distributed.Client(found, timeout=LIMIT_S, set_as_default=False) as client:  # type: ignore[no-untyped-call]
            client.wait_for_workers(1, timeout=LIMIT_S)
        yield found


class _running:
    """A process that ends with the block; with all that it started."""

    def __init__(self, words: list[str], directory: Path, environment: dict[str, str]) -> None:
        self._words, self._directory, self._environment = words, directory, environment

    def __enter__(self) -> None:
        log = (self._directory / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                self._words,
                cwd=self._directory,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # A worker whose nanny had no time to end it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _wait_for_file(path: Path) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not path.is_file() or not path.stat().st_size:
        assert time.monotonic() < until_s, (path.parent / "log").read_text()
        time.sleep(0.05)


def test_a_sweep_on_a_cluster_gives_what_one_here_gives(tmp_path: Path, address: str) -> None:
    text = SWEEP.replace("noise = 0.5", "noise = 0.5\nfails_at = 2")
    here = run(put(tmp_path, text), output=tmp_path / "here", workers=0)
    there = run(put(tmp_path, text), output=tmp_path / "there", dask=address)
    for name, values in here.columns.items():
        if name != "run_s":
            np.testing.assert_array_equal(values, there.columns[name])
    assert (there.meta["dask"], there.meta["runs"]["failed"]) == (address, 12)
    # Prepared arrays went along; the worker's own cache has none.
    again = run(put(tmp_path, text), output=tmp_path / "there", dask=address)
    assert again.meta["runs"] == {"total": 36, "kept": 24, "made": 12, "failed": 12}


def test_a_worker_with_other_code_is_refused(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "OUR_CODE", lambda *_: ["other"])
    with pytest.raises(ExperimentError, match="has other code than this machine"):
        run(put(tmp_path), output=tmp_path / "out", dask=address)


def test_a_worker_with_other_source_of_a_model_of_ones_own_is_refused(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_alike.py").write_text(OWN)
    (tmp_path / "own_other.py").write_text(OWN.replace("float(seed)", "2.0 * seed"))
    monkeypatch.syspath_prepend(tmp_path)
    text = '[experiment]\nname="a"\nmodel="{}:MODEL"\nseeds=2\n'
    found = run(put(tmp_path, text.format("own_alike")), output=tmp_path / "out", dask=address)
    assert found.columns["m"].tolist() == [1.0, 2.0]
    with pytest.raises(ExperimentError, match="has other code than this machine"):
        run(put(tmp_path, text.format("own_other")), output=tmp_path / "out", dask=address)


def test_an_address_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "_CONNECT_S", 0.5)
    with pytest.raises(ExperimentError, match=r"dask tcp://127.0.0.1:1 does not answer"):
        run(put(tmp_path), output=tmp_path / "out", dask="tcp://127.0.0.1:1")


def test_without_distributed_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ExperimentError, match=r"dask needs the extra: .* install 'distributed"):
        run(put(tmp_path), output=tmp_path / "out", dask="tcp://127.0.0.1:1")

"""Runs on a Dask cluster by its address, for sweeps that one machine is too small for. `distributed` is an extra."""

from __future__ import annotations

import hashlib
import importlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ebbtide.extras import installing
from ebbtide.simulator.errors import ExperimentError
from ebbtide.simulator.experiments import code
from ebbtide.simulator.experiments.experiment import Run
from ebbtide.simulator.experiments.finished import Finished, code_of, execute, failed
from ebbtide.simulator.experiments.model import model_named
from ebbtide.simulator.experiments.processes import Event
from ebbtide.simulator.experiments.shared import packed

_CONNECT_S = 10.0
#: Prepared data in this process, by its key: one is kept, so that a worker unpacks it once a sweep.
_PREPARED: Final[dict[str, tuple[Any]]] = {}


def events(address: str, model: str, prepared: Any, runs: Sequence[Run]) -> Iterator[Event]:
    """Make these runs on the cluster; says what happens until all have finished.

    :raises ExperimentError: `distributed` is missing, the scheduler does not answer, or a worker has other code.
    """
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise ExperimentError("dask", f"needs the extra: {installing('dask')}") from error
    try:
        client = distributed.Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ExperimentError("dask", f"{address} does not answer: {error}") from error
    with client:
        try:
            client.wait_for_workers(1, timeout=_CONNECT_S)
        except TimeoutError as error:
            raise ExperimentError("dask", f"{address} has no workers") from error
        _same_code(client, model)
        content = packed(prepared, whole=True)
        token = hashlib.sha256(content).hexdigest()
        data = client.scatter(content, broadcast=True, hash=False)
        futures: dict[Any, int] = {}
        try:
            for number, run in enumerate(runs):
                future = client.submit(
                    remote, model, token, data, dict(run.case.given), run.seed, key=f"ebb-{run.key}", pure=False
                )
                futures[future] = number
            for future in distributed.as_completed(futures, loop=client.loop):
                lost = future.exception()
                # Not the run failed but its machine: lost, or the run took its process along.
                finished = future.result() if lost is None else failed(lost)
                yield Event(futures[future], finished, {})
                future.release()
        finally:
            client.cancel([future for future in futures if not future.done()])


def remote(model: str, token: str, content: bytes, given: Mapping[str, Any], seed: int) -> Finished:
    """One run, in a worker of the cluster."""
    found = _PREPARED.get(token)
    if found is None:
        found = (pickle.loads(content),)
        # Other threads of this worker may be at another sweep: each goes on with what it has found.
        _PREPARED.clear()
        _PREPARED[token] = found
    return execute(model_named(model), given, seed, found[0], lambda share: None)


#: What a worker's code is compared with.
OUR_CODE = code_of


def _same_code(client: Any, model: str) -> None:
    """Results of other code would stand beside ours under our name."""
    modules = code.own_modules(model_named(model), model)
    try:
        theirs = client.run(code_of, model, modules)
    except Exception as error:
        raise ExperimentError("dask", f"workers cannot run {model}: {error}") from error
    for worker, found in theirs.items():
        if found != OUR_CODE(model, modules):
            raise ExperimentError("dask", f"worker {worker} has other code than this machine")

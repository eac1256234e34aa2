"""Document of what a predictor knows: to go on after a restart, or to begin another pool with (warm start).

Documents hold numbers, texts, lists and mappings, so that they can be written as JSON. Zeros, most of what there is,
are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.predict.ages import BINS, FIRST_S, PER_DOUBLING
from ebbtide.matcher.predict.changes import Direction, LastChange
from ebbtide.matcher.predict.landmarks import AGES, FREE, STEPS
from ebbtide.matcher.predict.period import Period
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from ebbtide.matcher.predict.rolling import FOLLOWED, MOST_CORES, Rolling, add_running

_VERSION: Final = 3
#: Of both versions before the landmarks are passed over, which were of other classes: they begin from nothing.
_READ: Final = (1, 2, _VERSION)
#: What a document's counts are counted on: another grid cannot be read.
_GRID: Final = [FIRST_S, PER_DOUBLING, BINS, MOST_CORES, FOLLOWED, AGES, STEPS, *FREE]
_SUMS: Final = ("all_entered", "all_ended", "all_sizes", "all_open_entered", "all_open_ended")
_PERIOD_SUMS: Final = ("all_watched", "all_failed")


def document(predictor: Predictor) -> dict[str, Any]:
    """All that a predictor knows, for `restored`."""
    options = predictor.options
    period = {"period": _of(predictor.period)} if predictor.by_landmarks else {}
    return {
        **period,
        "version": _VERSION,
        "kind": "predictor",
        "grid": _GRID,
        "now": predictor.now,
        "late": predictor.late,
        "since": predictor.since,
        "slices": [options.window_s, options.horizon_s, options.look_every_s],
        "rows": dict(predictor.rows),
        "last": {
            name: [last.at, last.direction.value, last.cores, last.gone] for name, last in predictor.lasts().items()
        },
        "rolling": _of(predictor.state),
    }


def restored(found: Mapping[str, Any], options: PredictorOptions | None = None) -> Predictor:
    """The predictor that wrote a document, at the time at which it did.

    :param options: with the same window, horizon and looks as it had; the other switches may differ. One that did not
        count landmarks has none for this; they begin with how the machines stood.
    :raises InvalidField: a document of another version, grid or window, or one that is damaged.
    """
    options = options or PredictorOptions()
    _check(found, "predictor")
    if found.get("slices") != [options.window_s, options.horizon_s, options.look_every_s]:
        raise InvalidField("window_s", "horizon_s and look_every_s must be those of the document")
    try:
        state = {name: _dense(values) for name, values in found["rolling"].items()}
        last = {
            name: LastChange(float(at), Direction(direction), int(cores), bool(gone))
            for name, (at, direction, cores, gone) in found["last"].items()
        }
        predictor = Predictor(float(found["now"]), options)
        watched = None
        if predictor.by_landmarks and found["version"] == _VERSION and "period" in found:
            watched = Period(**{name: _dense(values) for name, values in found["period"].items()})
        rows = {str(name): int(row) for name, row in found["rows"].items()}
        predictor.take_over(rows, last, Rolling(**state), int(found["late"]), float(found["since"]), watched)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidField("document", f"is damaged: {error}") from error
    return predictor


def prior(predictor: Predictor) -> dict[str, Any]:
    """What a pool has shown, without its machines: to begin another pool with."""
    state = predictor.state
    entered, opened = state.all_entered.copy(), state.all_open_entered.copy()
    # What still runs counts up to now: else the machines that have lost cores already would stand for the whole pool.
    add_running(state, predictor.now, entered, opened)
    state = state._replace(all_entered=entered, all_open_entered=opened)
    sums = {name: _sparse(getattr(state, name)) for name in _SUMS}
    if predictor.by_landmarks:
        sums |= {name: _sparse(getattr(predictor.period, name)) for name in _PERIOD_SUMS}
    return {"version": _VERSION, "kind": "prior", "grid": _GRID, "sums": sums}


def warm(predictor: Predictor, found: Mapping[str, Any], weight: float = 20.0) -> None:
    """Let a pool begin with what another one has shown.

    What was not counted by the other one, or is not by this, is left out.

    :param weight: how many intervals, and landmarks, it counts as, for good; the pool's own soon outweigh it.
    :raises InvalidField: a document of another version or grid, or a weight that is not above 0. Nothing is changed.
    """
    _check(found, "prior")
    if not 0.0 < weight < np.inf:
        raise InvalidField("weight", f"must be above 0 and finite, but is {weight!r}")
    try:
        same = found["version"] == _VERSION
        period = _PERIOD_SUMS if predictor.by_landmarks and same and _PERIOD_SUMS[0] in found["sums"] else ()
        sums = {name: _dense(found["sums"][name]) for name in (*_SUMS, *period)}
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidField("sums", f"are damaged: {error}") from error
    for name in _SUMS:
        if sums[name].shape != getattr(predictor.state, name).shape:
            raise InvalidField(f"sums.{name}", "has another shape")
    for name in period:
        if sums[name].shape != getattr(predictor.period, name).shape:
            raise InvalidField(f"sums.{name}", "has another shape: horizon_s must be that of the prior")
    intervals = float(sums["all_ended"].sum())
    watched = float(sums["all_watched"][:, 0].sum()) if period else 0.0
    for names, state, count in (
        (_SUMS, predictor.state, intervals),
        (period, predictor.period, watched),
    ):
        for name in names:
            if count > 0:
                getattr(state, name)[...] += sums[name] * (weight / count)
    predictor.changed()


def _check(found: Mapping[str, Any], kind: str) -> None:
    if found.get("version") not in _READ:
        raise InvalidField("version", f"must be {_VERSION} or before, but is {found.get('version')!r}")
    if found.get("kind") != kind:
        raise InvalidField("kind", f"must be {kind}, but is {found.get('kind')!r}")
    if list(found.get("grid", [])) != _GRID:
        raise InvalidField("grid", "is not the one that this version counts on")


def _of(arrays: Rolling | Period) -> dict[str, Any]:
    return {name: _sparse(values) for name, values in arrays._asdict().items()}


def _sparse(values: NDArray[Any]) -> dict[str, Any]:
    flat = values.ravel()
    index = np.flatnonzero(flat)
    return {
        "shape": list(values.shape),
        "type": "integers" if values.dtype.kind == "i" else "floats",
        "index": index.tolist(),
        "value": flat[index].tolist(),
    }


def _dense(found: Mapping[str, Any]) -> NDArray[Any]:
    kind = {"integers": np.int64, "floats": np.float64}[found["type"]]
    values: NDArray[Any] = np.zeros(found["shape"], kind)
    flat = values.reshape(-1)
    flat[np.asarray(found["index"], np.int64)] = found["value"]
    return values

"""Models of waits by scikit-learn, and what they are worth on what they have not seen (Ambati et al. 2021 §3.2).

A forest decides; a straight line and gradient boosting are judged beside it, as in the paper.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.matcher.policies.forest import Forest, nothing
from ebbtide.matcher.policies.waiting import believed
from ebbtide.simulator.errors import MissingExtra
from ebbtide.simulator.extras import Later
from ebbtide.simulator.jobs.columns import Floats

ensemble: Any = Later("sklearn.ensemble")
linear: Any = Later("sklearn.linear_model")
selection: Any = Later("sklearn.model_selection")

#: Rows are cut into so many stretches of time, each judged by a model that has learned from two thirds of the others.
#: Rows that stand side by side are much alike: a model that is judged by rows drawn singly has seen them, nearly.
_STRETCHES: Final = 12
_FOLDS: Final = 3
#: What is judged: names as in metrics.
MODELS: Final = ("forest", "boosting", "line")


@dataclass(frozen=True)
class Learned:
    """A forest and what it is worth.

    :param mcc: Matthews' coefficients by model, on stretches of time that it has not seen; NaN where one class is
        missing. ``mixed`` has those on rows drawn singly, as the paper's judges them.
    :param late: jobs that waited b or longer: rows, times those that each stands for.
    :param digest: SHA-256 of what it has learned from.
    """

    forest: Forest
    mcc: dict[str, float]
    mixed: dict[str, float]
    rows: int
    late: int
    digest: str
    model: Any = None

    def say(self, rows: Floats) -> Floats:
        """How likely each row is late; shape (count,)."""
        if self.model is None:
            return np.zeros(len(rows))
        said: Floats = self.model.predict(rows)
        return said

    @property
    def believed(self) -> bool:
        """Whether it decides (`matcher.policies.waiting.believed`)."""
        return believed(self.mcc["forest"], self.late)


def correlation(said: Floats, true: Floats) -> float:
    """Matthews' coefficient of two yes-or-no columns: 1 always right, 0 as chance, -1 always wrong.

    NaN where the truth has one class only; 0 where what was said has.
    """
    yes, was = said >= 0.5, true >= 0.5
    if was.all() or not was.any():
        return math.nan
    both, neither = float((yes & was).sum()), float((~yes & ~was).sum())
    wrong, missed = float((yes & ~was).sum()), float((~yes & was).sum())
    scale = (both + wrong) * (both + missed) * (neither + wrong) * (neither + missed)
    return (both * neither - wrong * missed) / math.sqrt(scale) if scale > 0 else 0.0


def learn(
    rows: Floats, labels: Floats, seed: int, models: tuple[str, ...] = MODELS, mixed: bool = True, stride: int = 1
) -> Learned:
    """Grow a forest, and say how good it is.

    :param rows: shape (count, features), in the order of time; ``labels``: shape (count,), 1 for a wait of b or more.
    :param models: which are judged; ``mixed``: also by rows drawn singly.
    :param stride: so many jobs a row.
    :raises MissingExtra: scikit-learn is not installed.
    """
    if not ensemble:
        raise MissingExtra("scikit-learn", "sim", "models of waits")
    digest = hashlib.sha256(np.ascontiguousarray(rows).tobytes() + labels.tobytes()).hexdigest()
    late = int((labels >= 0.5).sum())
    if late in (0, len(rows)) or len(rows) < _STRETCHES:
        none = dict.fromkeys(models, math.nan)
        return Learned(nothing(), none, none, len(rows), late * stride, digest)
    stretch = np.arange(len(rows)) * _STRETCHES // len(rows)
    mcc = _judged(models, rows, labels, stretch, seed)
    alike: dict[str, float] = {}
    if mixed:
        alike = _judged(models, rows, labels, np.random.default_rng([seed, 137]).permutation(len(rows)), seed)
    model = _model("forest", seed).fit(rows, labels)
    return Learned(_arrays(model), mcc, alike, len(rows), late * stride, digest, model)


def _model(name: str, seed: int) -> Any:
    if name == "forest":
        return ensemble.RandomForestRegressor(
            n_estimators=16, max_depth=12, min_samples_leaf=20, max_features=5, random_state=seed
        )
    if name == "boosting":
        return ensemble.HistGradientBoostingRegressor(max_iter=50, min_samples_leaf=20, random_state=seed)
    return linear.LinearRegression()


def _judged(
    models: tuple[str, ...], rows: Floats, labels: Floats, parts: NDArray[np.int64], seed: int
) -> dict[str, float]:
    """Coefficients by model, each third of the parts judged by one that has learned from the others."""
    return {name: correlation(_unseen(name, rows, labels, parts % _FOLDS, seed), labels) for name in models}


def _unseen(name: str, rows: Floats, labels: Floats, folds: NDArray[np.int64], seed: int) -> Floats:
    """What models say of the rows of each fold that have learned from the others; shape (count,)."""
    split = selection.PredefinedSplit(folds)
    said: Floats = selection.cross_val_predict(_model(name, seed), rows, labels, cv=split)
    return said


def _arrays(model: Any) -> Forest:
    """A grown forest as arrays."""
    trees = [tree.tree_ for tree in model.estimators_]
    roots = np.cumsum([0, *(tree.node_count for tree in trees)])[:-1]
    low, high = (
        np.concatenate([getattr(tree, side) + root for tree, root in zip(trees, roots, strict=True)])
        for side in ("children_left", "children_right")
    )
    return Forest(
        roots=roots.astype(np.int64),
        feature=np.concatenate([tree.feature for tree in trees]).astype(np.int64),
        threshold=np.concatenate([tree.threshold for tree in trees]),
        low=low.astype(np.int64),
        high=high.astype(np.int64),
        value=np.concatenate([tree.value[:, 0, 0] for tree in trees]),
    )

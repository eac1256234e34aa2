"""Schemes that are compared (Agarwal 2023 §4.1, App. B): by name, each a policy and what happens to tasks under it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ebbtide.matcher.match.matching import MatchOptions
from ebbtide.matcher.match.rounds import LIVE, LIVE_PREDICTION
from ebbtide.matcher.predict.predictor import PredictorOptions
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.jobs.policy import Policy
from ebbtide.simulator.jobs.settings import Settings
from ebbtide.simulator.matching import oracle, replicas
from ebbtide.simulator.matching.policy import policy as matcher
from ebbtide.simulator.matching.pools import Pool


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to schedule.

    :param nodes: a policy that looks at room only (`simulator.jobs.nodes`), or an oracle; None: the matcher.
    :param replicas: of each task, on machines apart; the first to be done ends the others.
    :param kills: which task goes first where a shrink leaves too little: the ``oldest`` (YARN, Agarwal 2023 §4.1) or
        the ``newest``, as live (`matcher.match.tasks.preempted`): P_c then holds for a task whatever comes after it.
    :param requeue: where it waits then: at the ``tail`` of the queue, or at its ``head``, as live.
    :param checkpoint_cost_s: of a checkpoint every 10 minutes, from which tasks go on elsewhere; 0: none.
    """

    nodes: str | None = None
    predicting: PredictorOptions = field(default_factory=PredictorOptions)
    matching: MatchOptions = field(default_factory=MatchOptions)
    checkpoint_cost_s: float = 0.0
    replicas: int = 1
    kills: str = "oldest"
    requeue: str = "tail"


_PAPER: Final = PredictorOptions(censored=False)
_SIZED: Final = PredictorOptions(sized=True)
_LANDMARK: Final = PredictorOptions(form="landmark", sized=True)

SCHEMES: Final[dict[str, Scheme]] = {
    # YARN's: a random node that has room; or the node that reports is filled as far as it goes (its default).
    "capacity-random": Scheme("random"),
    "capacity-filling": Scheme("filling"),
    "oracle-no-shrink": Scheme("oracle-no-shrink"),
    "oracle-no-kill": Scheme("oracle-no-kill"),
    "checkpoint-1-min": Scheme("random", checkpoint_cost_s=60.0),
    "checkpoint-2-min": Scheme("random", checkpoint_cost_s=120.0),
    "replicas-3": Scheme("replicas", replicas=3),
    # The paper's rules to the letter: completed intervals, every shrink fatal, no promises.
    "paper": Scheme(predicting=_PAPER, matching=MatchOptions(promises=False)),
    "paper-no-delay": Scheme(predicting=_PAPER, matching=MatchOptions(delay=False)),
    # One switch at a time.
    "censored": Scheme(matching=MatchOptions(promises=False)),
    "promises": Scheme(),
    "no-delay": Scheme(matching=MatchOptions(delay=False)),
    "equation-3": Scheme(predicting=PredictorOptions(form="next-shrink")),
    "sized": Scheme(predicting=_SIZED),
    "sized-no-delay": Scheme(predicting=_SIZED, matching=MatchOptions(delay=False)),
    "sized-no-promises": Scheme(predicting=_SIZED, matching=MatchOptions(promises=False)),
    "landmark": Scheme(predicting=_LANDMARK),
    "landmark-no-delay": Scheme(predicting=_LANDMARK, matching=MatchOptions(delay=False)),
    "landmark-spare": Scheme(predicting=_LANDMARK, matching=MatchOptions(spare=0.02)),
    "landmark-period": Scheme(predicting=PredictorOptions(form="landmark", sized=True, period=True)),
    # The newest task goes first where a shrink leaves too little; and, as live, waits before all others then.
    "capacity-random-newest": Scheme("random", kills="newest"),
    "landmark-newest": Scheme(predicting=_LANDMARK, kills="newest"),
    "capacity-random-live": Scheme("random", kills="newest", requeue="head"),
    "capacity-filling-live": Scheme("filling", kills="newest", requeue="head"),
    "landmark-live": Scheme(predicting=_LANDMARK, matching=LIVE, kills="newest", requeue="head"),
    # What a manager does by default.
    "live": Scheme(predicting=LIVE_PREDICTION, matching=LIVE, kills="newest", requeue="head"),
}


def named(name: str) -> Scheme:
    """A scheme by its name. Raises InvalidParameter."""
    if name not in SCHEMES:
        raise InvalidParameter("policy", f"must be one of {', '.join(SCHEMES)}, not {name!r}")
    return SCHEMES[name]


def engine_policy(scheme: Scheme, pool: Pool) -> Policy | str:
    """What the engine takes."""
    if scheme.nodes is None:
        return matcher(scheme.predicting, scheme.matching)
    if scheme.nodes in oracle.KINDS:
        return oracle.policy(scheme.nodes, pool.machine, pool.at_s, pool.cores)
    if scheme.nodes == "replicas":
        return replicas.policy()
    return scheme.nodes


def engine_settings(scheme: Scheme, **changes: Any) -> Settings:
    """What happens to tasks under a scheme; only cores matter."""
    given = {
        "checkpoint_every_s": 600.0 if scheme.checkpoint_cost_s else 0.0,
        "checkpoint_cost_s": scheme.checkpoint_cost_s,
        "replicas": scheme.replicas,
        "kills": scheme.kills,
        "requeue": scheme.requeue,
        "memory": False,
    }
    return Settings(**{**given, **changes})

"""Schemes that are compared (Agarwal 2023 §4.1, App. B): by name, each a policy and what happens to tasks under it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from ebbtide.matcher.match.matching import THRESHOLD, MatchOptions
from ebbtide.matcher.match.rounds import LIVE, LIVE_PREDICTION
from ebbtide.matcher.predict.predictor import PredictorOptions
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.jobs.policy import Policy
from ebbtide.simulator.jobs.settings import Settings
from ebbtide.simulator.matching import oracle, replicas
from ebbtide.simulator.matching.futures import Foreseen
from ebbtide.simulator.matching.policy import policy as matcher
from ebbtide.simulator.matching.pools import Pool


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to schedule.

    :param nodes: a policy that looks at room only (`simulator.jobs.nodes`), or an oracle; None: the matcher.
    :param replicas: of each task, on machines apart; the first to be done ends the others.
    :param heartbeat: machines report one after another, and each report is answered by Algorithm 3 (YARN's turn).
    :param checkpoint_every_s: between two checkpoints, from which tasks go on elsewhere; 0: none.
    :param checkpoint_cost_s: of each.
    :param known: the part of what is said of machines that comes of who knows all VMs to come, and not on which server
        (`futures.Foreseen`). With landmarks.
    """

    nodes: str | None = None
    predicting: PredictorOptions = field(default_factory=PredictorOptions)
    matching: MatchOptions = field(default_factory=MatchOptions)
    checkpoint_every_s: float = 0.0
    checkpoint_cost_s: float = 0.0
    replicas: int = 1
    heartbeat: bool = False
    known: float = 0.0


_PAPER: Final = PredictorOptions(censored=False)
_SIZED: Final = PredictorOptions(sized=True)
_LANDMARK: Final = PredictorOptions(form="landmark", sized=True)

SCHEMES: Final[dict[str, Scheme]] = {
    # YARN's: a random node that has room; or the node that reports is filled as far as it goes (its default).
    "capacity-random": Scheme("random"),
    "capacity-filling": Scheme("filling"),
    # The node with the fewest cores in use, or with the most idle ones: Slurm's LLN on nodes of as many CPUs, whose
    # lost cores stand idle, or count as in use. Neither predicts anything.
    "capacity-least-loaded": Scheme("least-loaded"),
    "capacity-worst-fit": Scheme("worst-fit"),
    "oracle-no-shrink": Scheme("oracle-no-shrink"),
    "oracle-no-kill": Scheme("oracle-no-kill"),
    "checkpoint-1-min": Scheme("random", checkpoint_every_s=600.0, checkpoint_cost_s=60.0),
    "checkpoint-2-min": Scheme("random", checkpoint_every_s=600.0, checkpoint_cost_s=120.0),
    # A kill costs no work: a bound on what any choice of machines can gain, but for their number.
    "capacity-lossless": Scheme("random", checkpoint_every_s=1.0),
    "replicas-3": Scheme("replicas", replicas=3),
    # The paper's rules to the letter: completed intervals, every shrink fatal, no promises.
    "paper": Scheme(predicting=_PAPER, matching=MatchOptions(promises=False)),
    "paper-no-delay": Scheme(predicting=_PAPER, matching=MatchOptions(delay=False)),
    # As it runs in the paper's engine, YARN: Algorithm 3. And with what else is known, answered likewise.
    "paper-heartbeat": Scheme(predicting=_PAPER, matching=MatchOptions(promises=False), heartbeat=True),
    "censored-heartbeat": Scheme(matching=MatchOptions(promises=False), heartbeat=True),
    "sized-heartbeat": Scheme(predicting=_SIZED, matching=MatchOptions(promises=False), heartbeat=True),
    # One switch at a time.
    "censored": Scheme(matching=MatchOptions(promises=False)),
    "promises": Scheme(),
    "equation-3": Scheme(predicting=PredictorOptions(form="next-shrink")),
    "sized": Scheme(predicting=_SIZED),
    "landmark": Scheme(predicting=_LANDMARK),
    "landmark-spare": Scheme(predicting=_LANDMARK, matching=MatchOptions(spare=0.02)),
    # A manager's match maker by Eq. 1 with sizes; and what it does by default, by landmarks.
    "sized-live": Scheme(predicting=_SIZED, matching=LIVE),
    "live": Scheme(predicting=LIVE_PREDICTION, matching=LIVE),
    # Who knows the VMs to come, alone and beside what was seen.
    "known": Scheme(predicting=LIVE_PREDICTION, matching=LIVE, known=1.0),
    "live-known": Scheme(predicting=LIVE_PREDICTION, matching=LIVE, known=0.5),
}


def named(name: str) -> Scheme:
    """A scheme by its name. Raises InvalidParameter."""
    if name not in SCHEMES:
        raise InvalidParameter("policy", f"must be one of {', '.join(SCHEMES)}, not {name!r}")
    return SCHEMES[name]


def engine_policy(
    scheme: Scheme, pool: Pool, threshold: float = THRESHOLD, foreseen: Foreseen | None = None
) -> Policy | str:
    """What the engine takes.

    :param threshold: of P_c, in schemes by heartbeat.
    :param foreseen: in schemes that know the VMs to come.
    """
    if scheme.nodes is None:
        matching = replace(scheme.matching, threshold=threshold)
        return matcher(scheme.predicting, matching, heartbeat=scheme.heartbeat, foreseen=foreseen)
    if scheme.nodes in oracle.KINDS:
        return oracle.policy(scheme.nodes, pool.machine, pool.at_s, pool.cores)
    if scheme.nodes == "replicas":
        return replicas.policy()
    return scheme.nodes


def engine_settings(scheme: Scheme, **changes: Any) -> Settings:
    """What happens to tasks under a scheme; only cores matter. The order of kills is no part of a scheme."""
    given = {
        "checkpoint_every_s": scheme.checkpoint_every_s,
        "checkpoint_cost_s": scheme.checkpoint_cost_s,
        "replicas": scheme.replicas,
        "memory": False,
    }
    return Settings(**{**given, **changes})

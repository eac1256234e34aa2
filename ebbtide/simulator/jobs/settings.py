"""Settings of a run: discipline, what happens to killed tasks, what is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ebbtide.matcher.policies.victims import ORDERS
from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.jobs import columns as c

DISCIPLINES: Final[Mapping[str, int]] = {"strict": c.STRICT, "conserving": c.CONSERVING, "easy": c.EASY}
KILLS: Final[Mapping[str, int]] = ORDERS
REQUEUE: Final[Mapping[str, int]] = {"tail": c.TAIL, "head": c.HEAD, "submission": c.SUBMISSION}
ESTIMATES: Final = ("exact", "requested")
#: After all that happens at one instant, or after every end as well.
LOOKS: Final[Mapping[str, int]] = {"instants": 0, "ends": 1}


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run goes.

    :param discipline: ``strict``: the first that cannot start blocks all others; ``conserving``: it is passed over;
        ``easy``: EASY backfilling (Lifka 1995): it is passed over by what does not delay it, by the estimates.
    :param kills: which task of a machine that shrinks is killed first: the ``oldest`` start as YARN's
        CapacityScheduler does (Agarwal et al. 2023 §4.1), the ``newest``, or the one that loses the least work
        (``least-lost``; `matcher.policies.victims`).
    :param requeue: where a killed task waits: at the ``tail`` of the queue, or at its ``head``, in the order of the
        kills; or where its job's ``submission`` puts it, as if it had never started (variableResources).
    :param looks: when the queue is looked at: once all that happens at an instant is over (``instants``), or also after
        every single end before (``ends``: variableResources): whoever is small takes each room as it comes.
    :param estimates: what the scheduler believes of runtimes: the ``exact`` ones, or what the trace says was
        ``requested``, and the exact ones where it says nothing. Of an `EstimatedJobBatch` it believes what that says.
    :param priorities: whether jobs of high priority go before others, and those of low priority after them.
    :param by_length: jobs of like core-time (`intake.length_class`; as it really is) have one rank, and the shorter go
        before the longer: shortest job first, to a quarter. Jobs of one task only, and not with priorities.
    :param memory: whether memory counts; where not, only cores do.
    :param depth: how many waiting tasks are looked at in one pass; 0: all.
    :param checkpoint_every_s: useful seconds between two checkpoints of a task, 0: none; each takes checkpoint_cost_s,
        and a killed task begins again at its last (Agarwal et al. 2023 §B.1).
    :param checkpointed: every so-manieth job makes them, beginning with the first; 1: all.
    :param from_s, to_s: what is measured: jobs that were submitted, and work that was done, in [from_s, to_s).
    :param short_s: slowdown is completion time / max(longest task, short_s).
    :param replicas: of each task, on whatever machines the policy chooses; the first to be done counts, and ends the
        others, whose work is lost (Agarwal et al. 2023 §B.1).
    :param validate: look at the whole state after every event.
    :raises InvalidParameter: names the field.
    """

    discipline: str = "conserving"
    kills: str = "oldest"
    requeue: str = "tail"
    looks: str = "instants"
    estimates: str = "exact"
    priorities: bool = False
    by_length: bool = False
    memory: bool = True
    depth: int = 0
    checkpoint_every_s: float = 0.0
    checkpoint_cost_s: float = 0.0
    checkpointed: int = 1
    from_s: float = -math.inf
    to_s: float = math.inf
    short_s: float = 10.0
    replicas: int = 1
    validate: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("discipline", DISCIPLINES),
            ("kills", KILLS),
            ("requeue", REQUEUE),
            ("looks", LOOKS),
            ("estimates", ESTIMATES),
        ):
            if getattr(self, name) not in known:
                raise InvalidParameter(name, f"must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        for name in ("checkpoint_every_s", "checkpoint_cost_s", "short_s", "depth"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidParameter(name, f"must be finite and not negative, but is {value:g}")
        if self.checkpointed < 1:
            raise InvalidParameter("checkpointed", f"must be at least 1, but is {self.checkpointed}")
        if not 1 <= self.replicas <= 16:
            raise InvalidParameter("replicas", f"must be from 1 to 16, but is {self.replicas}")
        if self.by_length and self.priorities:
            raise InvalidParameter("by_length", "and priorities give ranks both")
        if not self.from_s < self.to_s:
            raise InvalidParameter("from_s", f"must be before to_s, but they are {self.from_s:g} and {self.to_s:g}")

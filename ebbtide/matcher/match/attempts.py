"""Observations of attempts, by their engine and their own records: those that the tasks' state machine reads.

A task is run by attempts. Each has a name of its own, and a record that it writes itself where it runs: its
claim before the command begins, its end afterwards. A claim is made once, by the attempt or by what makes sure that
it will never begin (it is sealed then), so that no attempt runs twice, whatever its engine forgets or repeats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

#: Bounded: others give their jobs any name, and ours is one of a directory.
_NAME: Final = re.compile(
    r"(?P<label>[a-z0-9-]{1,40})\.(?P<task>[a-z0-9-]{1,40})\.(?P<key>[0-9a-f]{1,32})\.(?P<number>[0-9]{1,9})", re.ASCII
)
#: Of a manager that has its engine to itself.
DEFAULT_LABEL: Final = "ebb"


class AttemptState(StrEnum):
    """Where an engine has an attempt."""

    #: It waits for a release.
    HELD = "held"
    #: It is to begin on a machine, and has not begun.
    RELEASED = "released"
    RUNNING = "running"
    #: Its engine is done with it, however it went.
    ENDED = "ended"
    #: Its engine does not know it (any more).
    GONE = "gone"


class Claim(StrEnum):
    """What an attempt's record says of its beginning."""

    NONE = "none"
    #: It has begun.
    BEGUN = "begun"
    #: It has not begun, and never will.
    SEALED = "sealed"


@dataclass(frozen=True, slots=True)
class Seen:
    """One attempt. Times are seconds since the epoch."""

    state: AttemptState
    #: By its engine.
    machine: str | None = None
    claim: Claim = Claim.NONE
    begun_at: float | None = None
    #: By the record; None: it has not ended by itself.
    exit_code: int | None = None
    ended_at: float | None = None
    #: Since its record last said that its command runs, whatever its engine says; None: it never did.
    silent_s: float | None = None
    #: When that was, by its file system.
    touched_at: float | None = None
    #: The engine's own words, where it has any.
    reason: str = ""
    #: It stands still and will go on, by its engine or with its machine: that its record is silent says nothing.
    suspended: bool = False
    #: It ended where it could not write its record.
    unrecorded: bool = False
    #: Where it began by its record, which its command can write.
    recorded_machine: str | None = None
    #: Whole cores that it holds or will hold there, by its engine; None: that does not say.
    cores: int | None = None
    #: It is released, and its engine has surely not begun it; where False, RELEASED leaves that to its record.
    queued: bool = False
    #: And never will there, as long as nobody changes something.
    never: bool = False

    @property
    def lives(self) -> bool:
        """Whether its engine may yet do something with it."""
        return self.state in (AttemptState.HELD, AttemptState.RELEASED, AttemptState.RUNNING)


NOTHING: Final = Seen(AttemptState.GONE)


#: Why a machine is drained that its scheduler mistrusted because we had changed its cores, and takes again.
RECOUNTED: Final = "ebbtide: its cores were counted anew"


@dataclass(frozen=True, slots=True)
class EngineMachine:
    """A machine as its engine has it. Whole cores."""

    name: str
    #: What the engine was configured with.
    most_cores: int
    usable_cores: int
    up: bool = True
    #: Why it takes no new task; empty where it does.
    drained: str = ""
    #: Cores that others' work holds there.
    foreign_cores: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """All that an engine has at one moment: its machines, and our attempts by name."""

    machines: Mapping[str, EngineMachine] = field(default_factory=dict)
    attempts: Mapping[str, Seen] = field(default_factory=dict)


def attempt_name(label: str, task: str, key: str, number: int) -> str:
    """The name of an attempt: ``LABEL.TASK.KEY.NUMBER``.

    :param label: tells the attempts of several managers with one engine apart.
    :param key: tells tasks apart that have had the same name one after another.
    """
    return f"{label}.{task}.{key}.{number}"


def task_of(attempt: str, label: str) -> tuple[str, str, int] | None:
    """Task, key and number of an attempt's name; None: it is not one of ours."""
    found = _NAME.fullmatch(attempt)
    if found is None or found["label"] != label:
        return None
    return found["task"], found["key"], int(found["number"])

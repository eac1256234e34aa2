"""Mode of this host: kept durably, checked before anything is done, changed by an operator."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from ebbtide.deflation.modes import HostEvent, HostMode, Reaction, reaction, refusal
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.hosts import ModeStatus
from ebbtide.messages.problem_codes import ProblemCode
from hostagent.errors import RequestRefused
from hostagent.state.history import History
from hostagent.state.journal import Journal

#: What each mode means, as it stands in the answer to a change.
MEANINGS: Final = {
    HostMode.ACTIVE: "is active: it takes commands, repairs drift and finishes what was begun",
    HostMode.DRAINING: "is draining: it takes no new VM, and its VMs grow as room appears",
    HostMode.PAUSED: "is paused: no VM is created and no size is changed until it is resumed",
    HostMode.OFF: "is off: what was taken is given back as far as there is room, then its VMs are left alone",
}


class Modes:
    """The mode, as the journal remembers it; what happens in it is said in `deflation.modes`."""

    def __init__(self, host_id: str, journal: Journal, history: History) -> None:
        self._host_id = host_id
        self._journal = journal
        self._history = history
        #: What is still to be undone, a sentence a VM; mode off only.
        self.unfinished: tuple[str, ...] = ()

    @property
    def mode(self) -> HostMode:
        return self._journal.mode.mode

    @property
    def reason(self) -> str:
        return self._journal.mode.reason

    @property
    def sentence(self) -> str:
        """The mode in words."""
        because = f" ({self.reason})" if self.reason else ""
        return f"{self._host_id} {MEANINGS[self.mode]}{because}"

    def does(self, event: HostEvent) -> bool:
        """Whether the agent acts on an event now; a command that is refused is not acted on."""
        return reaction(self.mode, event) is Reaction.DONE

    def check(self, event: HostEvent) -> None:
        """:raises RequestRefused: the mode refuses this command (409)."""
        if why := refusal(self._host_id, self.mode, self.reason, event):
            raise RequestRefused(409, why, code=ProblemCode.MODE_FORBIDS)

    async def set(self, mode: HostMode, reason: str) -> None:
        """Change the mode, durably, and say so in one sentence in log and history.

        :raises JournalError: it could not be written; the mode is as before.
        """
        before, since = self.mode, self._journal.mode.since
        at = since if mode is before else time.time()
        await asyncio.to_thread(self._journal.set_mode, mode, reason, at)
        self.unfinished = ()
        self._history.note(None, DecisionKind.MODE, self.sentence, {"mode": mode.value, "before": before.value})

    def status(self) -> ModeStatus:
        """What the API says of it."""
        return ModeStatus(
            mode=self.mode,
            reason=self.reason,
            since=self._journal.mode.since,
            sentence=self.sentence,
            unfinished=self.unfinished,
        )

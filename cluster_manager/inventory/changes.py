"""Numbers of what has changed in the cluster, for clients that ask again and want only what is new to them.

A number is one above all before it, and of no use to another manager but to be compared: the first is the time at which
a term begins, in microseconds, so that numbers of an earlier term are either below the oldest or above the latest one.
Both get the whole list, as does a client that was away for too long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

Kind = Literal["host", "host's VMs", "VM"]
#: So many changes of one kind are remembered; of one thing only the last.
MOST: Final = 50_000


class Changes:
    """What has changed since when, in one term.

    :param begun_at: seconds since the epoch.
    """

    def __init__(self, begun_at: float) -> None:
        self.latest = self._oldest = int(begun_at * 1e6)
        #: The number of each thing's last change, the latest change last.
        self._of: dict[Kind, dict[str, int]] = {"host": {}, "host's VMs": {}, "VM": {}}

    def note(self, kind: Kind, names: Iterable[str]) -> None:
        """These have changed just now, or are gone."""
        of = self._of[kind]
        for name in names:
            self.latest += 1
            of.pop(name, None)
            of[name] = self.latest
            if len(of) > MOST:
                first = next(iter(of))
                self._oldest = max(self._oldest, of.pop(first))

    def knows(self, since: int) -> bool:
        """Whether all that has changed since a number is remembered."""
        return self._oldest <= since <= self.latest

    def since(self, kind: Kind, since: int) -> set[str]:
        """The names of what has changed after a number."""
        found: set[str] = set()
        for name, number in reversed(self._of[kind].items()):
            if number <= since:
                break
            found.add(name)
        return found

"""What becomes of a domain of ours that no VM belongs to. Pure."""

from __future__ import annotations

from enum import Enum, auto

from hostagent.state.intents import Intent, Phase


class Fate(Enum):
    """Of such a domain."""

    #: It is looked after again, with its disk: libvirt did not name it for a while.
    TAKEN_BACK = auto()
    #: Left as it is, and told of: another domain is looked after as the VM of its name.
    LEFT = auto()
    #: It moves: once it runs here it runs nowhere else.
    AWAITED = auto()
    #: Its owner gets it back.
    GIVEN_BACK = auto()
    #: It goes with its disk: what is left of a creation, or a deletion that was not finished.
    REMOVED = auto()


def fate(intent: Intent, state: str, failed: bool, name_taken: bool) -> Fate:
    """Only what was being created or deleted, or never came, is removed; never what has another owner.

    :param state: of the domain.
    :param failed: whether the intent's operation was answered as failed: then it is not carried out.
    :param name_taken: whether there is a VM of its name.
    """
    kind = intent.cause.kind if intent.cause is not None else ""
    moves = intent.phase is Phase.ARRIVING
    deleted = intent.phase is Phase.DELETING and not (failed and kind == "delete")
    if intent.adopted is not None:
        if failed and kind == "adopt":
            return Fate.GIVEN_BACK
    elif intent.phase is Phase.CREATING or deleted or (moves and state == "stopped"):
        return Fate.REMOVED
    if moves and state != "running":
        return Fate.AWAITED
    return Fate.LEFT if name_taken else Fate.TAKEN_BACK

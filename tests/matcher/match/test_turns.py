"""What one turn has the engine do with machines that are drained, and by whom."""

from __future__ import annotations

import pytest

from ebbtide.matcher.match.attempts import DEFAULT_LABEL, EngineMachine, Look
from ebbtide.matcher.match.rounds import Pool
from ebbtide.matcher.match.tasks import Drain, Instruction, Undrain
from ebbtide.matcher.match.turns import FOREIGN, LEAVING, Turn, said_by, turn
from ebbtide.matcher.predict.predictor import Predictor


def turned(machine: EngineMachine, label: str, leaving: bool = False) -> Turn:
    """A turn with one machine that is to be given back, or is somebody else's."""
    names = frozenset({machine.name})
    look, pool = Look({machine.name: machine}), Pool(Predictor(0.0))
    if leaving:
        return turn((), look, {}, pool, 0.0, label, leaving=names)
    return turn((), look, {}, pool, 0.0, label, foreign=names)


@pytest.mark.parametrize("label", [DEFAULT_LABEL, "south"])
def test_a_machine_that_is_to_be_given_back_is_drained_and_one_of_somebody_else_is_not(label: str) -> None:
    machine = EngineMachine("harvest-1", 2, 2)
    assert turned(machine, label, leaving=True).instructions == (Drain("harvest-1", said_by(label, LEAVING)),)
    made = turned(machine, label)
    assert made.instructions == ()
    # It takes none of our tasks all the same.
    assert made.machines["harvest-1"].drained == FOREIGN


@pytest.mark.parametrize(
    ("label", "words", "up", "instructions"),
    [
        # Another manager's word, an operator's: whatever happens.
        ("south", LEAVING, True, ()),
        ("south", LEAVING, False, ()),
        ("south", "new disks", False, ()),
        # Ours, of when it was ours or of a version that went by names.
        ("south", said_by("south", LEAVING), True, (Undrain("harvest-1"),)),
        (DEFAULT_LABEL, LEAVING, False, (Undrain("harvest-1"),)),
        # Another manager may have this label, too: it would drain again what we give free, in each turn.
        (DEFAULT_LABEL, LEAVING, True, ()),
    ],
)
def test_the_drain_of_somebody_elses_machine_is_taken_away_only_where_it_was_ours(
    label: str, words: str, up: bool, instructions: tuple[Instruction, ...]
) -> None:
    machine = EngineMachine("harvest-1", 2, 2, up=up, drained=words)
    assert turned(machine, label).instructions == instructions

"""What happens in each mode of a host: the code's table, and that the documentation shows the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ebbtide.deflation.modes import HostEvent, HostMode, Reaction, reaction, refusal, takes_new_vms

DOCS = Path(__file__).resolve().parents[3] / "docs" / "reference" / "modes.md"
COMMANDS = [HostEvent.CREATE, HostEvent.SHRINK, HostEvent.GROW, HostEvent.RECLAIM, HostEvent.REINFLATE]


def documented() -> dict[tuple[HostMode, HostEvent], str]:
    """The first word of every cell of the table: `event` | active | draining | paused | off."""
    rows = re.findall(r"^\| `([a-z-]+)`[^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|$", DOCS.read_text(), re.MULTILINE)
    modes = (HostMode.ACTIVE, HostMode.DRAINING, HostMode.PAUSED, HostMode.OFF)
    return {
        (mode, HostEvent(event)): cell.split()[0].rstrip(",;:")
        for event, *cells in rows
        for mode, cell in zip(modes, cells, strict=True)
    }


def test_the_documented_table_is_the_one_that_is_obeyed() -> None:
    obeyed = {(mode, event): reaction(mode, event).value for mode in HostMode for event in HostEvent}
    assert documented() == obeyed


@pytest.mark.parametrize("mode", HostMode)
def test_a_limit_without_swap_behind_it_is_lifted_in_every_mode(mode: HostMode) -> None:
    assert reaction(mode, HostEvent.LIMIT_UNBACKED) is Reaction.DONE


@pytest.mark.parametrize("mode", [HostMode.PAUSED, HostMode.OFF])
def test_paused_and_off_change_no_size_on_command_or_alone(mode: HostMode) -> None:
    for event in (*COMMANDS, HostEvent.DRIFT, HostEvent.UNFINISHED, HostEvent.HELLO, HostEvent.PRESSURE):
        assert reaction(mode, event) is not Reaction.DONE, event
    assert reaction(mode, HostEvent.DELETE) is Reaction.DONE


def test_only_an_active_host_takes_new_vms() -> None:
    assert [mode for mode in HostMode if takes_new_vms(mode)] == [HostMode.ACTIVE]


def test_a_refusal_says_what_the_mode_means_why_it_is_and_how_to_leave_it() -> None:
    assert refusal("host-a", HostMode.PAUSED, "new disks", HostEvent.RECLAIM) == (
        "host-a is paused: no VM is created and no size is changed (new disks); "
        "`ebb host resume host-a` makes it active again"
    )
    assert refusal("host-a", HostMode.DRAINING, "", HostEvent.SHRINK) == (
        "host-a is draining: it takes no new VM and its VMs only grow; `ebb host resume host-a` makes it active again"
    )
    assert refusal("host-a", HostMode.OFF, "", HostEvent.GROW) == (
        "host-a is off: its VMs are left alone; `ebb host resume host-a` makes it active again"
    )


@pytest.mark.parametrize("mode", HostMode)
@pytest.mark.parametrize("event", HostEvent)
def test_only_commands_are_ever_refused_and_active_refuses_none(mode: HostMode, event: HostEvent) -> None:
    said = refusal("host-a", mode, "", event)
    assert bool(said) == (reaction(mode, event) is Reaction.REFUSED)
    if said:
        assert mode is not HostMode.ACTIVE
        assert event in (*COMMANDS, HostEvent.RELEASE)

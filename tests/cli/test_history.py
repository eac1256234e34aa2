"""What `ebb vm history` and `ebb host history` print."""

from __future__ import annotations

import pytest

from ebbtide.cli.commands.records import _print_history, sparkline
from ebbtide.messages.history import Columns, HistoryMark, VMHistory


def history(**series: tuple[float | None, ...]) -> VMHistory:
    nothing = dict.fromkeys(Columns.model_fields, (None, None, None))
    mark = HistoryMark(time=90.0, event_id=7, kind="resized", sentence="web gave 1 core\x1b[31m")
    columns = Columns.model_validate({**nothing, **series})
    return VMHistory(
        vm="web", columns=columns, from_=0.0, to=180.0, step_s=60.0, times=(0.0, 60.0, 120.0), marks=(mark,)
    )


def test_a_line_has_a_bar_for_each_step_from_nothing_to_its_most_and_a_hole_where_nothing_is_known() -> None:
    assert sparkline((0.0, 1.0, None, 2.0)) == "▁▅·█"
    assert sparkline((0.0, 0.0)) == "▁▁"
    assert sparkline((None, None)) == "··"


def test_a_table_has_the_figures_that_are_known_and_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    _print_history(history(bound_cpu_cores=(2.0, 1.5, 1.0), guest_cpu_cores=(0.0, 0.5, None)))
    said = capsys.readouterr().out
    bound = next(line.split() for line in said.splitlines() if "bound_cpu_cores" in line)
    assert bound == ["bound_cpu_cores", "1", "2", "1", "█▆▅"]
    assert "steps of 1 min" in said
    assert "resident_memory_mib" not in said
    assert "web gave 1 core" in said
    assert "\x1b" not in said


def test_a_time_of_which_nothing_is_known_is_said_to_be_that(capsys: pytest.CaptureFixture[str]) -> None:
    _print_history(history())
    assert "nothing is known of that time" in capsys.readouterr().out


def test_a_document_has_its_names_as_they_are_on_the_wire() -> None:
    sent = history().model_dump(mode="json")
    assert sent["from"] == 0.0
    assert "from_" not in sent
    assert VMHistory.model_validate(sent) == history()

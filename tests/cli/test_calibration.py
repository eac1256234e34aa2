"""`ebb machine calibration`: the deciles as tables, and as the API has them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ebbtide.cli.commands import options
from ebbtide.cli.main import app
from ebbtide.messages.machines import CalibrationCurve, CalibrationReport, Decile

REPORT = CalibrationReport(
    machines=CalibrationCurve(
        count=500,
        brier=0.1234,
        worst_error=0.051,
        deciles=(
            Decile(low=0.6, count=300, predicted=0.655, observed=0.604),
            Decile(low=0.9, count=200, predicted=0.95, observed=0.94),
        ),
    ),
    tasks=CalibrationCurve(count=1, brier=0.04, deciles=(Decile(low=0.8, count=1, predicted=0.8, observed=1.0),)),
)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options.Asking, "ask", lambda self, question: REPORT)


@pytest.mark.usefixtures("reported")
def test_each_curve_is_a_table_under_its_figures() -> None:
    printed = CliRunner().invoke(app, ["machine", "calibration"])
    assert printed.exit_code == 0, printed.output
    lines = [" ".join(line.split()) for line in printed.output.splitlines()]
    assert lines[0] == "machines: 500 predictions with an outcome, Brier score 0.123, largest error: 5.1 points"
    assert "0.6 300 0.655 0.604" in lines
    assert "0.9 200 0.950 0.940" in lines
    assert "tasks: 1 predictions with an outcome, Brier score 0.040, largest error: no decile has 200 of them" in lines
    assert "0.8 1 0.800 1.000" in lines


@pytest.mark.usefixtures("reported")
def test_json_is_the_answer_of_the_manager() -> None:
    printed = CliRunner().invoke(app, ["machine", "calibration", "-o", "json"])
    assert CalibrationReport.model_validate(json.loads(printed.output)) == REPORT

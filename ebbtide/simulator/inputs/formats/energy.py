"""Series of the power grid: carbon intensity (Electricity Maps tables) and generation by source (ENTSO-E tables)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import numpy as np

from ebbtide.simulator.errors import InvalidParameter
from ebbtide.simulator.inputs.batches import Floats, SeriesBatch
from ebbtide.simulator.inputs.report import Report
from ebbtide.simulator.inputs.tables import Builder, Column, Form, Format, Options, Rows, Table

_INTENSITIES: Final = ("direct", "lifecycle")
_SOURCES: Final = (
    "Biomass",
    "Fossil Gas",
    "Fossil Hard coal",
    "Fossil Oil",
    "Hydro Water Reservoir",
    "Nuclear",
    "Other",
    "Solar",
    "Wind Offshore",
    "Wind Onshore",
)


class _Series(Builder):
    """Rows of one value each; those without one are skipped."""

    def add(self, table: Table) -> Rows | None:
        value = self._value(table)
        missing = np.isnan(value)
        kept = self.skip(table, {"no value": missing})
        if not len(kept):
            return None
        return Rows(SeriesBatch(at_s=kept["time"], value=value[~missing]), kept.lines)

    @abstractmethod
    def _value(self, table: Table) -> Floats:
        """The value of each row; NaN: none."""


class _Carbon(_Series):
    def __init__(self, options: Options, report: Report) -> None:
        super().__init__(options, report)
        if options["intensity"] not in _INTENSITIES:
            raise InvalidParameter("intensity", f"must be direct or lifecycle, not {options['intensity']!r}")

    def _value(self, table: Table) -> Floats:
        return self.column(table, str(self.options["intensity"]))


CARBON: Final = Format(
    name="carbon-intensity",
    title="carbon intensity of a grid, hourly (Electricity Maps csv; --option intensity=lifecycle)",
    kind="series",
    columns=(
        Column("time", Form.TIME, aliases=("Datetime (UTC)",)),
        Column(
            "direct",
            minimum=0,
            optional=True,
            aliases=("Carbon intensity gCO₂eq/kWh (direct)", "Carbon Intensity gCO₂eq/kWh (direct)"),
        ),
        Column(
            "lifecycle",
            minimum=0,
            optional=True,
            aliases=("Carbon intensity gCO₂eq/kWh (Life cycle)", "Carbon Intensity gCO₂eq/kWh (LCA)"),
        ),
    ),
    builder=_Carbon,
    header="required",
    defaults={"intensity": "direct"},
    calendar=True,
    unit="gCO2/kWh",
)


class _Generation(_Series):
    def __init__(self, options: Options, report: Report) -> None:
        super().__init__(options, report)
        self._sources = [name.strip() for name in str(options["sources"]).split("+")]
        for name in self._sources:
            if name not in _SOURCES:
                raise InvalidParameter("sources", f"has {name!r}, which is none of {', '.join(_SOURCES)}")

    def _value(self, table: Table) -> Floats:
        return np.asarray(np.sum([self.column(table, name) for name in self._sources], axis=0))


GENERATION: Final = Format(
    name="generation",
    title="generation by source (ENTSO-E csv), wind by default (--option sources=Solar+Nuclear)",
    kind="series",
    columns=(
        Column("time", Form.TIME, aliases=("",)),
        *(Column(name, minimum=0, optional=True) for name in _SOURCES),
    ),
    builder=_Generation,
    header="required",
    defaults={"sources": "Wind Offshore+Wind Onshore"},
    calendar=True,
    unit="MW",
)

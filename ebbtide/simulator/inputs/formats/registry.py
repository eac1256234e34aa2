"""Registry of the trace formats: the table that readers, recognition, the command and docs go by."""

from __future__ import annotations

from typing import Final, TypeAlias

from ebbtide.simulator.inputs.documents import DocumentFormat
from ebbtide.simulator.inputs.formats import alibaba, azure, borg, energy, gaia, google, hawk, opendc, own, spot, swf
from ebbtide.simulator.inputs.parquet import ParquetFormat
from ebbtide.simulator.inputs.tables import Format

AnyFormat: TypeAlias = Format | ParquetFormat | DocumentFormat

#: In the order in which they are tried on an unknown file; those with headers first, they cannot be mistaken.
_FORMATS: Final[tuple[AnyFormat, ...]] = (
    *own.TABLES,
    *own.PARQUETS,
    azure.DERIVED,
    gaia.GAIA,
    alibaba.OPENB_PODS,
    alibaba.OPENB_NODES,
    alibaba.DLRM,
    google.TASKS_2019_CSV,
    energy.CARBON,
    energy.GENERATION,
    opendc.TASKS,
    spot.AVAILABILITY,
    google.TASKS_2019,
    google.MACHINES_2019,
    swf.SWF,
    borg.WINDOW,
    spot.NODES,
    spot.POLLS,
    azure.VMTABLE,
    google.TASKS_2011,
    google.MACHINES_2011,
    alibaba.BATCH_TASKS,
    alibaba.MACHINES,
    alibaba.SAMPLE_TASKS,
    hawk.TR,
)
ALL: Final = {form.name: form for form in _FORMATS}

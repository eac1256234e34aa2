"""What hypothesis draws: vectors, allocations and hosts full of VMs."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ebbtide.deflation.allocations import Allocation, Priority
from ebbtide.deflation.floors import effective_minimum
from ebbtide.deflation.resources import COMPONENTS, ResourceVector


def runs(max_examples: int = 100) -> settings:
    """So many runs, however slow the machine is: nothing here is timed."""
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


cores = st.integers(0, 6400).map(lambda hundredths: hundredths / 100)
mib = st.integers(0, 65_536).map(float)
bandwidths = st.sampled_from([0.0, 0.0, 10.0, 125.0, 1000.0])
vectors = st.builds(ResourceVector, cores, mib, bandwidths, bandwidths)
needs = st.builds(
    ResourceVector,
    st.floats(0, 80, allow_nan=False),
    st.floats(0, 100_000, allow_nan=False),
    st.one_of(st.just(0.0), st.floats(0, 2000, allow_nan=False)),
    st.just(0.0),
)


@st.composite
def allocations(draw: st.DrawFn, name: str = "vm", on_grid: bool = False) -> Allocation:
    """One VM, somewhere between its effective minimum and its upper size; off the grid unless told otherwise."""
    priority = draw(st.sampled_from(Priority))
    nominal = ResourceVector(
        draw(st.integers(10, 1600)) / 100,
        float(draw(st.integers(192, 32_768))),
        draw(bandwidths),
        draw(bandwidths),
    )
    minimum = nominal
    if priority is not Priority.FIXED:
        asked = ResourceVector(*(draw(st.integers(0, 100)) / 100 * size for size in nominal))
        if on_grid:
            asked = ResourceVector(round(asked.cpu_cores, 2), *(float(round(v)) for v in list(asked)[1:]))
        minimum = effective_minimum(asked.smaller(nominal), nominal)
    ceiling = None
    if priority is Priority.HARVEST:
        ceiling = nominal * (1 + draw(st.integers(0, 4)))
    upper = ceiling or nominal
    current = upper
    if priority is not Priority.FIXED:
        shares = [draw(st.integers(0, 1000)) / 1000 for _ in COMPONENTS]
        exact = [low + (high - low) * part for low, high, part in zip(minimum, upper, shares, strict=True)]
        if on_grid:
            exact = [round(exact[0], 2), *(float(round(value)) for value in exact[1:])]
        current = ResourceVector(*exact).larger(minimum).smaller(upper)
    return Allocation(name, priority, nominal, minimum, current, ceiling, float(draw(st.integers(0, 400))))


@st.composite
def hosts(draw: st.DrawFn, on_grid: bool = False, largest: int = 7) -> list[Allocation]:
    """The VMs of one host, with names of their own."""
    count = draw(st.integers(0, largest))
    return [draw(allocations(f"vm-{number}", on_grid)) for number in range(count)]

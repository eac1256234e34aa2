"""Settings of a PostgreSQL at a size. Pure; sizes of settings are kB, as PostgreSQL means it (1024 bytes).

What is set is what a reload takes over (PostgreSQL 15: 20.4 Resource Consumption); shared_buffers are not among it.
"""

from __future__ import annotations

from typing import Any, Mapping

from app_adapters.adapter import FULL_SHARE

WORKERS = "max_parallel_workers"
PER_GATHER = "max_parallel_workers_per_gather"
CORE_SETTINGS = (WORKERS, PER_GATHER)
#: The least that each goes down to, kB; one that starts below stays as it is.
LEAST_KIB = {
    "work_mem": 1024,
    "maintenance_work_mem": 16384,
    "autovacuum_work_mem": 16384,
    "effective_cache_size": 65536,
}
MEMORY_SETTINGS = tuple(LEAST_KIB)
#: Of pg_settings.source: this session's alone, by ALTER ROLE and ALTER DATABASE (global: ALTER ROLE ALL).
HIDING_SOURCES = ("user", "database", "database user", "global")
PER_SESSION_MIB = 3.0  # catalogue caches and stack of a backend that has done something


def in_kib(setting: str, unit: str | None) -> int:
    """A setting of pg_settings in kB; -1, which means another setting, stays."""
    factors = {"kB": 1, "8kB": 8, "MB": 1024, "16MB": 16384, "GB": 1048576}
    value = int(setting)
    return value if value < 0 else value * factors.get(unit or "kB", 1)


def allowed_mib(memory_kib: Mapping[str, int], sessions: int, autovacuum_workers: int) -> float:
    """Private memory that the settings allow: every session its work_mem once, every worker its maintenance memory."""
    maintenance_kib = memory_kib["maintenance_work_mem"]
    autovacuum_kib = memory_kib.get("autovacuum_work_mem", -1)
    vacuum_kib = autovacuum_workers * (maintenance_kib if autovacuum_kib < 0 else autovacuum_kib)
    work_kib = sessions * (memory_kib["work_mem"] + PER_SESSION_MIB * 1024)
    return (work_kib + maintenance_kib + vacuum_kib) / 1024


def share_of(target_mib: float, minimum_mib: float, maximum_mib: float) -> float:
    """How much of its memory settings it can have at a target: 1 at full size, 0 at the minimum."""
    if target_mib >= FULL_SHARE * maximum_mib:
        return 1.0
    if maximum_mib <= minimum_mib:
        return 0.0
    return min(max((target_mib - minimum_mib) / (maximum_mib - minimum_mib), 0.0), 1.0)


def memory_settings(original_kib: Mapping[str, int], share: float) -> dict[str, int]:
    """The memory settings at a share of the original ones, kB. -1 (as another setting) stays."""
    scaled = {}
    for name, original in original_kib.items():
        if original > 0:
            # Whole blocks: effective_cache_size is kept in units of 8 kB, and would read back as another value.
            whole = int(original * share) // 8 * 8 if share < 1 else original
            scaled[name] = max(whole, min(LEAST_KIB[name], original))
    return scaled


def server_wide(values: Mapping[str, int], sources: Mapping[str, str]) -> dict[str, int]:
    """Of changes, those of settings whose server-wide value is known: what a role or a database sets hides it, so that
    a share of what is seen could raise the setting of everybody else."""
    return {name: value for name, value in values.items() if sources.get(name) not in HIDING_SOURCES}


def core_settings(original: Mapping[str, int], cores: float) -> dict[str, int]:
    """Parallel workers for so many cores, at least one, and never more than there were."""
    workers = min(max(int(cores), 1), original[WORKERS])
    return {WORKERS: workers, PER_GATHER: min(original[PER_GATHER], workers)}


def lowered(now: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, int]:
    """What a deflation changes: it never raises a setting."""
    return {name: value for name, value in wanted.items() if value < now[name]}


def raised(now: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, int]:
    """What a reinflation changes: it never lowers one."""
    return {name: value for name, value in wanted.items() if value > now[name]}


def sessions_to_end(idle_mib: Mapping[int, float], surplus_mib: float) -> list[int]:
    """Of the idle sessions (pid: MiB), the largest ones, until they make up the surplus."""
    chosen: list[int] = []
    for pid, size_mib in sorted(idle_mib.items(), key=lambda item: (-item[1], item[0])):
        if surplus_mib <= 0:
            break
        chosen.append(pid)
        surplus_mib -= size_mib
    return chosen


def statements(values: Mapping[str, int]) -> list[str]:
    """ALTER SYSTEM for integers; the names are this module's."""
    return [f"ALTER SYSTEM SET {name} = '{written(name, value)}'" for name, value in values.items()]


def written(name: str, value: int) -> str:
    """As it then stands in postgresql.auto.conf."""
    return f"{int(value)}kB" if name in MEMORY_SETTINGS else str(int(value))


def wrote(
    before: Mapping[str, list[str]], values: Mapping[str, int], stands: Mapping[str, str]
) -> dict[str, list[str]]:
    """By name, what may stand in postgresql.auto.conf by us once these are being written: each, or what stands there.

    :param before: the same, of earlier writing.
    """
    return {**before, **{name: [*_one(stands.get(name)), written(name, value)] for name, value in values.items()}}


def _one(text: str | None) -> list[str]:
    return [] if text is None else [text]


def ours(state: Mapping[str, Any], stands: Mapping[str, str | None]) -> list[str]:
    """Of the settings that were changed, those that hold what we wrote, or still what was there before: another value
    is an operator's. One without a note of what was written counts as ours."""
    earlier, texts = state["earlier"], state["written"]
    return [
        name for name in state["changed"] if name not in texts or stands.get(name) in (earlier.get(name), *texts[name])
    ]


def restoring(earlier: Mapping[str, str | None]) -> list[str]:
    """ALTER SYSTEM that puts postgresql.auto.conf back: its value of before, or none."""
    return [
        f"ALTER SYSTEM RESET {name}"
        if value is None
        else f"ALTER SYSTEM SET {name} = '" + value.replace("'", "''") + "'"
        for name, value in earlier.items()
    ]

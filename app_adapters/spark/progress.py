"""Progress of a Spark application, and how much killed tasks would have to compute again. Pure, on parsed rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Sequence

from app_adapters.errors import ApplicationError

#: A stage that writes less than this share of what it reads passes on results, not data: sums of K-means, not blocks.
LIGHT_SHUFFLE = 0.02
#: Shuffles below this many bytes are always light: a stage that has only begun has read next to nothing.
LIGHT_BYTES = 256 * 1024


@dataclass(frozen=True)
class Stage:
    """A row of /api/v1/applications/ID/stages. Times in seconds since the epoch, None where it has not come to that."""

    id: int
    name: str
    status: str
    tasks: int
    tasks_done: int
    began_s: float | None
    ended_s: float | None
    read_bytes: float
    shuffle_read_bytes: float
    shuffle_written_bytes: float

    def seconds(self, now_s: float) -> float:
        """Wall time that it has taken so far."""
        if self.began_s is None:
            return 0.0
        return max((now_s if self.ended_s is None else self.ended_s) - self.began_s, 0.0)

    @property
    def writes_data(self) -> bool:
        """Whether what it leaves for the next stage is of the order of what it reads."""
        written = self.shuffle_written_bytes
        return written > LIGHT_BYTES and written > LIGHT_SHUFFLE * (self.read_bytes + self.shuffle_read_bytes)

    @property
    def reads_data(self) -> bool:
        """Whether it had to wait for the data of all tasks before it."""
        return self.shuffle_read_bytes > LIGHT_BYTES


def stages(rows: Any) -> list[Stage]:
    """The rows of an answer. Raises: ApplicationError where they are not what Spark sends."""
    if not isinstance(rows, list):
        raise ApplicationError("stages: Spark answered without a list")
    return [_stage(row) for row in rows]


def progress(found: Sequence[Stage], expected: int = 0) -> float:
    """c: the share of stages that are completed, a stage under way by its tasks; skipped ones do not count.

    `expected` is the number of stages of the whole application, where it says so: Spark knows only those of jobs
    that it was given already, and an iterative program gives it one at a time.
    """
    done = total = 0.0
    for stage in _last_attempts(found):
        if stage.status == "SKIPPED":
            continue
        total += 1
        if stage.status == "COMPLETE":
            done += 1
        elif stage.tasks > 0:
            done += min(stage.tasks_done / stage.tasks, 1.0)
    total = max(total, expected)
    return min(done / total, 1.0) if total else 0.0


def recomputed(found: Sequence[Stage], now_s: float) -> float:
    """r: synchronous time over the total running time; 1 where a shuffle of data is about to happen (004 §4.1.1).

    Synchronous stages are those that read a shuffle of data. A light shuffle is none: every aggregation ends in one,
    and what it loses is not worth a recomputation.
    """
    latest = _last_attempts(found)
    began = [stage.began_s for stage in latest if stage.began_s is not None]
    if not began:
        return 0.0
    if any(stage.status == "ACTIVE" and _about_to_shuffle(stage, latest) for stage in latest):
        return 1.0
    synchronous_s = sum(stage.seconds(now_s) for stage in latest if stage.reads_data)
    total_s = max(now_s - min(began), sum(stage.seconds(now_s) for stage in latest))
    return min(synchronous_s / total_s, 1.0) if total_s > 0 else 0.0


def waves(found: Sequence[Stage], slots: float, now_s: float) -> float:
    """Tasks of a stage for each slot, a mean over the stages by how long they took; at least 1."""
    latest = [stage for stage in _last_attempts(found) if stage.tasks > 0 and stage.seconds(now_s) > 0]
    seconds = sum(stage.seconds(now_s) for stage in latest)
    if slots <= 0 or seconds <= 0:
        return 1.0
    return sum(max(stage.tasks / slots, 1.0) * stage.seconds(now_s) for stage in latest) / seconds


def _about_to_shuffle(active: Stage, found: Sequence[Stage]) -> bool:
    """Whether it writes data for a shuffle, by its own bytes or those of an earlier stage of the same line."""
    return active.writes_data or any(
        stage.status == "COMPLETE" and stage.name == active.name and stage.writes_data for stage in found
    )


def _last_attempts(found: Sequence[Stage]) -> list[Stage]:
    """One row a stage: Spark lists attempts newest first."""
    latest: dict[int, Stage] = {}
    for stage in found:
        latest.setdefault(stage.id, stage)
    return list(latest.values())


def _stage(row: Any) -> Stage:
    if not isinstance(row, dict) or not isinstance(row.get("status"), str):
        raise ApplicationError("stages: Spark answered with a row that is no stage")
    return Stage(
        id=int(_number(row, "stageId")),
        name=str(row.get("name", ""))[:200],
        status=row["status"],
        tasks=int(_number(row, "numTasks")),
        tasks_done=int(_number(row, "numCompleteTasks")),
        began_s=_time(row, "submissionTime"),
        ended_s=_time(row, "completionTime"),
        read_bytes=_number(row, "inputBytes"),
        shuffle_read_bytes=_number(row, "shuffleReadBytes"),
        shuffle_written_bytes=_number(row, "shuffleWriteBytes"),
    )


def _number(row: dict[str, Any], field: str) -> float:
    value = row.get(field, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e18:
        raise ApplicationError(f"stages: {field}: Spark answered with something that is no amount")
    return float(value)


def _time(row: dict[str, Any], field: str) -> float | None:
    value = row.get(field)
    if value is None:
        return None
    try:
        moment = datetime.strptime(value, "%Y-%m-%dT%H:%M:%S.%fGMT")
    except (TypeError, ValueError):
        raise ApplicationError(f"stages: {field}: Spark answered with something that is no time") from None
    return moment.replace(tzinfo=timezone.utc).timestamp()

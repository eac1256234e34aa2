"""What a task prints, for those who may see it.

The file is the task's: what is there may be anything that its command has put there (`matcher.engines.records`).
"""

from __future__ import annotations

import codecs
from pathlib import Path

from cluster_manager.errors import RequestError
from ebbtide.matcher.engines.records import OUTPUT, Records
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.errors import EngineRefused, EngineUnreachable
from ebbtide.matcher.match.tasks import Task, TaskPhase
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.messages.tasks import TaskOutput, TaskState


def file_of(settings: EngineSettings, task: Task) -> Path | None:
    """The file with what the last attempt that has begun prints; None where there is none."""
    attempt = task.begun_name(settings.label)
    return settings.directory / attempt / OUTPUT if settings.directory is not None and attempt is not None else None


def check_reader(settings: EngineSettings, task: Task, reader: str) -> None:
    """Where tenants have users of their own, what a task prints is for those whose tasks are that user's.

    :param reader: who asks, by the name of the token.
    :raises RequestError: 403.
    """
    mine = settings.users.get(reader, settings.user)
    if settings.users and (mine is None or mine != (task.order.user or settings.user)):
        raise RequestError(
            403, f"{task.name} is another user's: what it prints is for that user and for admins", "name"
        )


async def read_output(settings: EngineSettings, task: Task, offset: int, limit: int) -> TaskOutput:
    """A part of what its last attempt prints; of a task as it was before the file is read.

    :param offset: bytes; negative: from the end.
    :param limit: bytes.
    :raises RequestError: 404, 409, 503.
    """
    path = file_of(settings, task)
    if path is None or settings.directory is None:
        why = "has not begun" if settings.directory is not None else "was run by no engine that this manager has"
        raise RequestError(404, f"{task.name} {why}", code=ProblemCode.NO_OUTPUT)
    try:
        found = await Records(settings.directory, settings.answer_s).output(path.parent.name, offset, limit)
    except EngineRefused as error:
        raise RequestError(409, f"{task.name}: {error}") from error
    except EngineUnreachable as error:
        raise RequestError(503, str(error)) from error
    if found is None:
        sentence = f"{task.name} has printed nothing that this manager's machine has"
        raise RequestError(404, sentence, code=ProblemCode.NO_OUTPUT)
    running = task.phase is TaskPhase.RUNNING
    text, used = _decoded(found.data, limit, more=running or found.offset + len(found.data) < found.size)
    return TaskOutput(
        name=task.name,
        state=TaskState(task.phase.value),
        attempt=task.began_attempt,
        running=running,
        text=text,
        offset=found.offset,
        next_offset=found.offset + used,
        size=found.size,
    )


def _decoded(data: bytes, limit: int, more: bool) -> tuple[str, int]:
    """The text, and of how many bytes it is: a character that is cut in two is left for the next part."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    cut = len(decoder.getstate()[0])
    if more and cut < limit:
        return text, len(data) - cut
    return text + decoder.decode(b"", final=True), len(data)

"""Route of the backup: the manager's store as one file, consistent while it is written."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import structlog
from aiohttp import ClientConnectionResetError, hdrs, web

from cluster_manager.api.forms import MANAGER
from cluster_manager.errors import RequestError, StoreError, busy
from cluster_manager.store.backup import back_up, check_room, prefix_of
from cluster_manager.store.database import Database
from ebbtide.rest.access import PRINCIPAL
from ebbtide.rest.descriptions import Answer, describe
from ebbtide.rest.parameters import check_parameters

log = structlog.get_logger()

CONTENT_TYPE: Final = "application/octet-stream"
_PIECE: Final = 2**18
#: What one write may take, seconds: a client that does not read does not keep others from theirs.
WRITE_S: Final = 30.0

routes = web.RouteTableDef()


@routes.get("/v1/backup", allow_head=False)
@describe(
    "A backup of the manager's store, for `ebb-manager restore`",
    tag="manager",
    answers={200: Answer(None, "A SQLite file, or a custom dump of pg_dump.", CONTENT_TYPE)},
    problems=(409,),
)
async def backup(request: web.Request) -> web.StreamResponse:
    check_parameters(request)
    manager = request.app[MANAGER]
    if manager.backing_up.locked():
        raise busy("another backup is under way")
    async with manager.backing_up:
        try:
            file, size = await asyncio.to_thread(_made, manager.settings.database)
        except StoreError as error:
            log.error("backup failed", why=str(error))
            raise RequestError(500, f"no backup was made: {error}") from error
        with file:
            # Its length tells a client that all of it has come.
            response = web.StreamResponse(headers={hdrs.CACHE_CONTROL: "no-store"})
            response.content_type, response.content_length = CONTENT_TYPE, size
            try:
                await response.prepare(request)
                while piece := await asyncio.to_thread(file.read, _PIECE):
                    async with asyncio.timeout(WRITE_S):
                        await response.write(piece)
                await response.write_eof()
            except (TimeoutError, ClientConnectionResetError):
                if request.transport is not None:
                    request.transport.abort()
                return response
    log.info("store backed up", bytes=size, who=request[PRINCIPAL].name)
    return response


def _made(database: Database) -> tuple[Any, int]:
    """An open file without a name that holds a backup, and its size: nothing is left of it when it is closed."""
    try:
        # Beside a file, where there is room for one like it, and nobody else looks.
        directory, prefix = None, ".backup."
        if isinstance(database, Path):
            directory, prefix = database.resolve().parent, prefix_of(database.resolve(), "backup")
            check_room(database.resolve())
        descriptor, name = tempfile.mkstemp(dir=directory, prefix=prefix)
        os.close(descriptor)
        try:
            back_up(database, Path(name))
            file = Path(name).open("rb")  # noqa: SIM115 - the caller closes it
        finally:
            Path(name).unlink(missing_ok=True)
        return file, os.fstat(file.fileno()).st_size
    except OSError as error:
        where = " beside the store" if isinstance(database, Path) else ""
        raise StoreError(f"it cannot be made{where}: {error.strerror}") from error

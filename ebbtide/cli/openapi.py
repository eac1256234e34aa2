"""OpenAPI documents of both REST interfaces, and schemas of the commands: ``make openapi``.

Or ``python -m ebbtide.cli.openapi DIRECTORY``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from cluster_manager.api import itself
from cluster_manager.api.app import ROUTES as MANAGER_ROUTES
from ebbtide.cli import schemas
from ebbtide.rest.openapi import text_of
from hostagent.api import openapi as api_openapi
from hostagent.api.app import ROUTES as AGENT_ROUTES

DIRECTORY: Final = Path("docs/openapi")


def documents() -> Mapping[str, dict[str, Any]]:
    """The documents by the names of their files."""
    manager, agent = web.Application(), web.Application()
    for routes in MANAGER_ROUTES:
        manager.add_routes(routes)
    for routes in AGENT_ROUTES:
        agent.add_routes(routes)
    return {
        "manager.json": itself.document(manager),
        "hostagent.json": api_openapi.document(agent),
        "cli.json": schemas.document(),
    }


def main() -> None:
    """Write them."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY
    for name, document in documents().items():
        (directory / name).write_text(text_of(document), encoding="utf-8")


if __name__ == "__main__":
    main()

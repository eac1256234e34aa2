"""schemathesis over a served OpenAPI document: a process of its own, real HTTP, the same requests every time."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from aiohttp import web

#: Rules between fields (a minimum above its nominal size) are no part of a JSON Schema, so that data that fits it may
#: be refused: `positive_data_acceptance` cannot hold. What a creation makes comes later: it is answered by 202. A task
#: that was cancelled can be looked at as before: `use_after_free`.
EXCLUDED = "positive_data_acceptance,ensure_resource_availability,use_after_free"
SEED = 7
#: Statuses by which what does not fit is refused.
REFUSED = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx"]
Seen = Counter[tuple[str, str, int]]


def watch(app: web.Application, seen: Seen) -> web.Application:
    """Count the answers of an application, which has not begun yet, by method, path and status."""

    async def count(request: web.Request, response: web.StreamResponse) -> None:
        resource = request.match_info.route.resource
        if resource is not None:
            seen[request.method, resource.canonical, response.status] += 1

    app.on_response_prepare.append(count)
    return app


async def run(
    url: str,
    token: str,
    directory: Path,
    *,
    document: Path | None = None,
    names: Mapping[str, Sequence[str | int]],
    max_examples: int,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
) -> str:
    """Run it and return what it found; the run has failed unless that ends with ``No issues found``.

    :param document: where it is not to be asked for it.
    :param names: values that exist, by parameter (``path.name``): used in most requests, so that they get somewhere.
    :param only, without: paths.
    """
    lines = ["[generation]", 'database = "none"']
    # A list that is one too long may be a body that is too long.
    lines += ["[checks.negative_data_rejection]", f"expected-statuses = {json.dumps(REFUSED)}"]
    for number, (parameter, values) in enumerate(names.items()):
        lines += [f"[dictionaries.d{number}]", f"values = {json.dumps(list(values))}"]
        lines += [f'[parameters."{parameter}"]', f'dictionary = "d{number}"', "probability = 0.9"]
    config = directory / "schemathesis.toml"
    await asyncio.to_thread(config.write_text, "\n".join(lines) + "\n")
    argv = [
        sys.executable,
        "-c",
        "from schemathesis.cli import schemathesis; schemathesis()",
        "--config-file",
        str(config),
        "--no-color",
        "run",
    ]
    argv += [str(document), "--url", url] if document is not None else [f"{url}/v1/openapi.json"]
    argv += ["--header", f"Authorization: Bearer {token}", "--header", "Accept: application/problem+json, */*"]
    argv += ["--seed", str(SEED)]
    argv += ["--exclude-checks", EXCLUDED, "--max-examples", str(max_examples)]
    argv += ["--continue-on-failure", "--request-timeout", "90", "--suppress-health-check", "all", "--warnings", "off"]
    argv += [option for path in only for option in ("--include-path", path)]
    argv += [option for path in without for option in ("--exclude-path", path)]
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=directory, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode(errors="replace")
    assert process.returncode == 0, text[-20_000:]
    return text


def unreached(app: web.Application, seen: Seen, without: Sequence[str] = ()) -> list[str]:
    """Routes that never answered that all is well: nothing was learned of them."""
    found = []
    for route in app.router.routes():
        path = route.resource.canonical if route.resource is not None else ""
        if (
            route.method != "HEAD"
            and path not in without
            and not any(seen[route.method, path, status] for status in (200, 202))
        ):
            found.append(f"{route.method} {path}")
    return found

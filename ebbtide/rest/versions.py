"""ETags: a client that has seen an answer gets 304, and a change made by an old answer is refused with 412.

The ETag of a thing that clients change is ``"VERSION.DIGEST"``: the version is of what they can change, the digest of
all that was answered. ``If-None-Match`` compares both, ``If-Match`` the version alone, so that figures that move by
themselves neither make an answer look unchanged nor a change look out of date.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from aiohttp import hdrs, web
from pydantic import BaseModel, Field

from ebbtide.deflation.errors import InvalidField
from ebbtide.rest.descriptions import Answer, Parameter

Tags = Annotated[str, Field(max_length=1000)]
IF_NONE_MATCH: Final = Parameter(hdrs.IF_NONE_MATCH, Tags, "ETags that the client has: 304 if one of them still stands")
IF_MATCH: Final = Parameter(hdrs.IF_MATCH, Tags, "ETag or version that the change is meant for: 412 if it is another")
UNCHANGED: Final = Answer(summary="The client has this already.", headers={hdrs.ETAG: "as in the request"})

_TAG: Final = re.compile(r'\s*(?:(W/)?"([^"\s]*)")\s*(?:,|$)')


def digest_of(*parts: str) -> str:
    """Sixteen hexadecimal digits that differ where the parts do; the same in every run."""
    return hashlib.sha256("\0".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()[:16]


def tagged(body: type[BaseModel]) -> Answer:
    """An answer of this model with an ETag."""
    return Answer(body, headers={hdrs.ETAG: "`version`, a dot, and a digest of the whole answer"})


def answer_tagged(
    request: web.Request, body: BaseModel, version: str, aside: Mapping[str, Any] | None = None
) -> web.Response:
    """200 with the body and its ETag, or 304 where ``If-None-Match`` names it.

    :param aside: values that count for nothing: two answers that differ in these fields only are the same.
    :raises InvalidField: the header holds no list of ETags.
    """
    counted = body.model_copy(update=dict(aside)) if aside else body
    tag = f"{version}.{digest_of(counted.model_dump_json())}"
    headers = {hdrs.ETAG: f'W/"{tag}"' if aside else f'"{tag}"', hdrs.CACHE_CONTROL: "no-cache"}
    if seen(request, tag):
        return web.Response(status=304, headers=headers)
    return web.Response(text=body.model_dump_json(), content_type="application/json", headers=headers)


def seen(request: web.Request, tag: str) -> bool:
    """Whether ``If-None-Match`` names this ETag, or is ``*``.

    :raises InvalidField: the header holds no list of ETags.
    """
    given = request.headers.get(hdrs.IF_NONE_MATCH)
    return given is not None and ((tags := _tags(hdrs.IF_NONE_MATCH, given)) is None or tag in tags)


def wanted_versions(request: web.Request) -> frozenset[str] | None:
    """The versions that ``If-Match`` allows; None: any.

    :raises InvalidField: the header holds no list of ETags.
    """
    given = request.headers.get(hdrs.IF_MATCH)
    tags = None if given is None else _tags(hdrs.IF_MATCH, given)
    return None if tags is None else frozenset(tag.partition(".")[0] for tag in tags)


def _tags(name: str, text: str) -> frozenset[str] | None:
    """The ETags in a header; None for ``*``."""
    if text.strip() == "*":
        return None
    tags, position = set(), 0
    while position < len(text):
        match = _TAG.match(text, position)
        if match is None:
            raise InvalidField(name, 'must be * or ETags in double quotes, such as "0123456789abcdef"')
        tags.add(match[2])
        position = match.end()
    if not tags:
        raise InvalidField(name, "holds no ETag")
    return frozenset(tags)

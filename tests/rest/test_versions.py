"""ETags: which answers count as the same, which versions a change is meant for, which headers are none."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from ebbtide.deflation.errors import InvalidField
from ebbtide.messages.common import Problem, Vector
from ebbtide.messages.hosts import HostStatus
from ebbtide.rest.versions import answer_tagged, digest_of, wanted_versions

BODY = Problem.of(400, "nothing")


def request(**headers: str) -> web.Request:
    return make_mocked_request("GET", "/", headers={name.replace("_", "-"): text for name, text in headers.items()})


def tag_of(answer: web.StreamResponse) -> str:
    return answer.headers["ETag"]


def test_the_same_answer_is_not_sent_twice() -> None:
    first = answer_tagged(request(), BODY, "v1")
    again = answer_tagged(request(If_None_Match=tag_of(first)), BODY, "v1")
    assert (first.status, again.status, again.body) == (200, 304, None)
    assert tag_of(again) == tag_of(first)


@pytest.mark.parametrize("header", ['"a", {}', '{}, "b"', "W/{}", "*"])
def test_one_tag_of_many_is_enough(header: str) -> None:
    tag = tag_of(answer_tagged(request(), BODY, "v1"))
    assert answer_tagged(request(If_None_Match=header.format(tag)), BODY, "v1").status == 304


def test_an_answer_that_differs_in_anything_is_sent() -> None:
    tag = tag_of(answer_tagged(request(), BODY, "v1"))
    other = Problem.of(400, "something")
    assert answer_tagged(request(If_None_Match=tag), other, "v1").status == 200
    assert answer_tagged(request(If_None_Match=tag), BODY, "v2").status == 200


def test_what_counts_for_nothing_makes_no_difference_and_a_weak_tag() -> None:
    def status(seen_at: float, free: float) -> HostStatus:
        size = Vector(cpu_cores=free)
        return HostStatus(
            id="a", url="http://a", state="ready", seen_at=seen_at, capacity=size, free=size, deflatable=size,
            accelerator="kvm", vms=(),
        )  # fmt: skip

    first = answer_tagged(request(), status(1.0, 4.0), "v", aside={"seen_at": 0.0})
    assert tag_of(first).startswith('W/"v.')
    known = request(If_None_Match=tag_of(first))
    assert answer_tagged(known, status(2.0, 4.0), "v", aside={"seen_at": 0.0}).status == 304
    assert answer_tagged(known, status(2.0, 3.0), "v", aside={"seen_at": 0.0}).status == 200


@pytest.mark.parametrize(
    ("header", "versions"),
    [
        ('"abc"', {"abc"}),
        ('"abc.def"', {"abc"}),
        ('"a.b" , W/"c"', {"a", "c"}),
        ("*", None),
    ],
)
def test_a_change_is_meant_for_the_versions_in_its_header(header: str, versions: Any) -> None:
    assert wanted_versions(request(If_Match=header)) == versions


def test_without_a_header_any_version_is_meant() -> None:
    assert wanted_versions(request()) is None


@pytest.mark.parametrize("header", ["abc", '"abc', '"a" "b"', "", " ", "w/'a'", '"a b"'])
def test_what_is_no_tag_is_refused_and_never_taken_for_any(header: str) -> None:
    with pytest.raises(InvalidField, match="If-Match"):
        wanted_versions(request(If_Match=header))


def test_digests_tell_parts_apart_and_stay_the_same_in_every_run() -> None:
    assert digest_of("ab", "c") != digest_of("a", "bc")
    assert digest_of("a") == "4162fddd39a3e422"

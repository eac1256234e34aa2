"""Random bytes into every parser of what comes from outside: a value or a refusal, soon, and with little memory.

The bytes are grown from small corpora: some hundred inputs for each parser, in the deep form a million in all.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import Target, targets

NAMES = tuple(targets(Path()))
#: Of all parsers together.
DEEP = int(os.environ.get("EBB_FUZZ_INPUTS", "1000000"))
MOST_S, MOST_MIB, MOST_BYTES = 1.0, 200.0, 100_000
#: Pieces that have broken parsers.
PIECES = (
    b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b"nan", b"NaN", b"-Infinity", b"1e999",
    b"-0", b"0x10", b"9" * 400, b"9" * 5000, b"1." + b"1" * 1000, b"[" * 2000, b'{"a":' * 2000, b"<a>" * 3000,
    b'"', b"'", b"{", b"}", b"]", b",", b":", b"\n", b"\r", b"\t", b" ", b"%", b"%00", b"//", b"@", b"&#0;", b"&lt;",
    b"<![CDATA[", b"]]>", b"<!--", b"null", b"true", b"[]", b"{}", b"\xe2\x80\xae", b"\xd9\xa4", b"=", b'"""', b"#",
)  # fmt: skip


#: Values that stand where others are expected.
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**53, 2**63, 10**400, 0.5, -0.0, 1e308, math.inf, math.nan, "", "\0", "\ud800", "\u202e",
    "a" * 9000, "1", [], {}, [[]], {"": {}}, ["a"] * 300, {"cpu_cores": -1}, {"xml": "<a/>"},
)  # fmt: skip


def twisted(chance: random.Random, value: Any) -> Any:
    """A document with one value in it that does not belong there."""
    if chance.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return chance.choice(VALUES)
    if isinstance(value, list):
        at = chance.randrange(len(value))
        return [*value[:at], twisted(chance, value[at]), *value[at + 1 :]]
    key = chance.choice(list(value))
    return {**value, key if chance.random() < 0.9 else chance.choice(("", "\ud800", "id")): twisted(chance, value[key])}


def mutant(chance: random.Random, corpus: tuple[bytes, ...]) -> bytes:
    """A relative of what is in the corpus."""
    data = bytearray(chance.choice(corpus))
    if data[:1] == b"{" and chance.random() < 0.5:
        return json.dumps(twisted(chance, json.loads(data))).encode()
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at = chance.randrange(len(data) + 1)
        until = min(at + chance.choice((0, 1, 4, 30)), len(data))
        match chance.randrange(6):
            case 0:
                data[at:until] = b""
            case 1:
                data[at:at] = chance.choice(PIECES)
            case 2:
                data[at:until] = chance.choice(PIECES)
            case 3:
                data[at:at] = chance.randbytes(chance.choice((1, 2, 8)))
            case 4:
                data[at:at] = data[until : until + 60] * chance.choice((1, 2, 50))
            case _ if data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
    return bytes(data[:MOST_BYTES])


def feed(target: Target, data: bytes) -> None:
    """One input. Any other error than a refusal is the parser's."""
    try:
        target.parse(data)
    except target.refusals as error:
        # It is told to people and written into JSON.
        if not str(error):
            raise AssertionError(f"a refusal without a word of {data[:2000]!r}") from error


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.mark.parametrize("name", NAMES)
def test_no_bytes_break_a_parser(name: str, tmp_path: Path) -> None:
    target = targets(tmp_path)[name]
    for data in target.corpus:
        feed(target, data)
    inputs = st.one_of(
        st.binary(max_size=200),
        st.text(max_size=100).map(lambda text: text.encode(errors="surrogatepass")),
        st.integers(0, 2**64).map(lambda seed: mutant(random.Random(seed), target.corpus)),
        st.integers(0, 2**64).map(lambda seed: mutant(random.Random(seed), (*target.corpus, b""))),
    )

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(inputs)
    def fed(data: bytes) -> None:
        feed(target, data)

    fed()


@pytest.mark.deep
@pytest.mark.timeout(7200)
def test_a_million_inputs_break_no_parser_and_cost_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, before_mib = [], _peak_mib()
    began = time.monotonic()
    for name, target in targets(tmp_path).items():
        chance, slowest, total_s = random.Random(name), 0.0, 0.0
        for number in range(-(-DEEP // len(NAMES))):
            data = mutant(chance, target.corpus)
            start = time.thread_time()
            try:
                feed(target, data)
            except Exception as error:
                raise AssertionError(f"{name}, input {number}: {data[:2000]!r}") from error
            took_s = time.thread_time() - start
            assert took_s < MOST_S, f"{name}, input {number}: {took_s:.1f} s for {data[:2000]!r}"
            slowest, total_s = max(slowest, took_s), total_s + took_s
        lines.append(f"{name}: {number + 1} inputs, {total_s:.1f} s, slowest {1000 * slowest:.1f} ms")
    grown_mib = _peak_mib() - before_mib
    lines.append(f"all: {DEEP} inputs, {time.monotonic() - began:.0f} s, memory grew by {grown_mib:.0f} MiB")
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert grown_mib < MOST_MIB


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

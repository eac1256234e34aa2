"""The JVM adapter against real JVMs, through the REST hook; sizes are read from the kernel by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.adapters.jvm_service import (
    CACHE_MIB,
    G1,
    JAVA_17,
    LIVE_MIB,
    MAXIMUM_MIB,
    SERIAL,
    SHENANDOAH,
    ZGC,
    Client,
    Service,
    compiled,
    flags,
    hooked,
    java_25,
)
from tests.waiting import until_sync

pytestmark = pytest.mark.service

MANAGED = ("SoftMaxHeapSize", "MinHeapFreeRatio", "MaxHeapFreeRatio", "G1PeriodicGCInterval")
TARGET_MIB = 150.0
Start = Callable[..., Service]


@pytest.fixture(scope="module")
def classes() -> Iterator[Path]:
    with compiled() as directory:
        yield directory


@pytest.fixture
def start(classes: Path) -> Iterator[Start]:
    services: list[Service] = []

    def one(*arguments: object, **options: object) -> Service:
        services.append(Service(classes, *arguments, **options))  # type: ignore[arg-type]
        return services[-1]

    yield one
    for service in services:
        service.stop()


@pytest.mark.parametrize(
    ("options", "java"),
    [
        pytest.param(SHENANDOAH, "", id="Shenandoah-17"),
        pytest.param(ZGC, "", id="ZGC-17"),
        pytest.param(G1, "", id="G1-17"),
        pytest.param(SERIAL, "", id="Serial-17"),
        pytest.param(SHENANDOAH, "25", id="Shenandoah-25"),
        pytest.param(G1, "25", id="G1-25"),
        pytest.param(ZGC, "25", id="ZGC-25"),
    ],
)
def test_a_deflated_jvm_gives_memory_back_answers_all_the_time_and_grows_again(
    options: tuple[str, ...],
    java: str,
    start: Start,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    service = start(options, java_25() if java else JAVA_17)
    originals = flags(service, *MANAGED)
    client = Client(service.port)
    client.start()
    with hooked(service, tmp_path) as rest:
        # By requests the young generation grows until it is collected: between two readings of a busy machine a lot.
        with client.silent():
            memory = rest.capabilities()["resources"]["memory_mib"]
            assert memory["current"] == pytest.approx(service.pss_mib(), abs=25)
            assert MAXIMUM_MIB < memory["maximum"] < MAXIMUM_MIB + 200
            # The service drops its cache: what it does not drop nobody can take.
            service.say("cache 0")
            before_mib = service.pss_mib()
            assert before_mib > LIVE_MIB + CACHE_MIB
            status, answer = rest.target("down", "deflate", TARGET_MIB)
            assert status == 202, answer
        assert answer["promised"]["memory_mib"] == pytest.approx(before_mib - TARGET_MIB, abs=15)
        done = rest.finished("down")
        after_mib = service.pss_mib()
        assert done["state"] == "released", done
        assert after_mib <= TARGET_MIB + 25, done
        # Never more than came back; what comes back later than the adapter looks is not in it.
        fall_mib = before_mib - after_mib
        assert 0.9 * fall_mib - 15 <= done["released"]["memory_mib"] <= 1.1 * fall_mib + 5, done
        assert flags(service, *MANAGED) != originals

        maximum_mib = rest.capabilities()["resources"]["memory_mib"]["maximum"]
        assert rest.target("up", "reinflate", maximum_mib)[0] == 202
        assert rest.finished("up")["state"] == "released"
        assert flags(service, *MANAGED) == originals
        assert not list((tmp_path / "state").iterdir())
        service.say(f"cache {CACHE_MIB}")
        assert service.pss_mib() > LIVE_MIB + CACHE_MIB
    seen = client.stop()
    print(options, seen, done)
    record_property("client", seen)
    assert seen["errors"] == 0, client.errors
    assert seen["requests"] > 20
    assert seen["p99_ms"] < 5000


@pytest.mark.parametrize("cycles", [4, pytest.param(10, marks=pytest.mark.deep)])
@pytest.mark.parametrize("options", [pytest.param(SHENANDOAH, id="Shenandoah"), pytest.param(G1, id="G1")])
def test_cycles_leave_nothing_behind(options: tuple[str, ...], start: Start, tmp_path: Path, cycles: int) -> None:
    service = start(options)
    originals = flags(service, *MANAGED)
    low, high = [], []
    with hooked(service, tmp_path) as rest:
        maximum_mib = rest.capabilities()["resources"]["memory_mib"]["maximum"]
        for i in range(cycles):
            service.say(f"cache {CACHE_MIB}")
            high.append(service.pss_mib())
            service.say("cache 0")
            assert rest.target(f"down{i}", "deflate", TARGET_MIB)[0] == 202
            done = rest.finished(f"down{i}")
            low.append(service.pss_mib())
            assert low[-1] <= TARGET_MIB + 25, done
            assert rest.target(f"up{i}", "reinflate", maximum_mib)[0] == 202
            rest.finished(f"up{i}")
            assert flags(service, *MANAGED) == originals
        half = cycles // 2
        assert sum(low[half:]) / half <= sum(low[:half]) / half + 15, low
        assert rest.capabilities()["resources"]["memory_mib"]["maximum"] <= maximum_mib + 40
    print(low, high)


def test_serial_in_steps_gets_there_with_more_collections(start: Start, tmp_path: Path) -> None:
    service = start(("-XX:+UseSerialGC",))
    with hooked(service, tmp_path) as rest:
        service.say("cache 0")
        status, answer = rest.target("down", "deflate", 110)
        assert status == 202
        assert "in steps" in answer["reason"]
        done = rest.finished("down")
        assert service.pss_mib() <= 135, done


def test_g1_stays_low_after_garbage(start: Start, tmp_path: Path) -> None:
    service = start(G1)
    with hooked(service, tmp_path) as rest:
        service.say("cache 0")
        rest.target("down", "deflate", TARGET_MIB)
        rest.finished("down")
        service.say("churn 400")
        until_sync(lambda: service.pss_mib() <= TARGET_MIB + 40, "its periodic collection brings it down again")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("-XX:+UseParallelGC",), "the Parallel collector gives no memory back"),
        ((*SHENANDOAH, f"-Xms{MAXIMUM_MIB}m"), "frozen"),
        ((*SHENANDOAH, "-XX:-ShenandoahUncommit"), "ShenandoahUncommit"),
        (("-XX:+UseZGC",), "ZUncommitDelay"),
        (("-XX:+UseZGC", "-XX:-ZUncommit"), "-XX:-ZUncommit"),
        ((*G1, "-XX:+DisableExplicitGC"), "DisableExplicitGC"),
    ],
)
def test_a_jvm_that_cannot_give_memory_back_refuses_with_the_reason(
    options: tuple[str, ...], reason: str, start: Start, tmp_path: Path
) -> None:
    service = start(options, cache_mib=50)
    originals = flags(service, *MANAGED)
    with hooked(service, tmp_path) as rest:
        service.say("cache 0")
        status, answer = rest.target("down", "deflate", 60)
        assert (status, answer["state"]) == (409, "refused")
        assert reason in answer["reason"]
        assert answer["floor"]["memory_mib"] == pytest.approx(service.pss_mib(), abs=15)
        assert flags(service, *MANAGED) == originals
        assert rest.target("up", "reinflate", 1000)[0] == 202
        rest.finished("up")
        assert flags(service, *MANAGED) == originals


def test_what_lives_is_not_taken_and_the_rest_is_told(start: Start, tmp_path: Path) -> None:
    service = start(SHENANDOAH)
    with hooked(service, tmp_path) as rest:
        before_mib = service.pss_mib()
        rest.target("down", "deflate", 100)
        done = rest.finished("down")
        assert "over the target stay resident" in done["reason"]
        assert done["released"]["memory_mib"] == pytest.approx(max(before_mib - service.pss_mib(), 0), abs=15)
        # Its live set is known now, and is the floor from here on; the limit has left it room.
        floor_mib = rest.capabilities()["resources"]["memory_mib"]["minimum"]
        assert floor_mib > LIVE_MIB + CACHE_MIB
        assert int(flags(service, "SoftMaxHeapSize")["SoftMaxHeapSize"]) >= 1.1 * (LIVE_MIB + CACHE_MIB) * 2**20
        service.say("get")


def test_a_target_above_what_it_holds_limits_it_without_a_collection(start: Start, tmp_path: Path) -> None:
    service = start(SHENANDOAH, cache_mib=20)
    with hooked(service, tmp_path) as rest:
        before_mib = service.pss_mib()
        status, answer = rest.target("wide", "deflate", 250)
        assert (status, answer["promised"]) == (202, {"memory_mib": 0.0})
        assert rest.finished("wide")["state"] == "released"
        assert service.pss_mib() >= before_mib - 15
        limit_mib = int(flags(service, "SoftMaxHeapSize")["SoftMaxHeapSize"]) / 2**20
        assert 150 < limit_mib < 250
        rest.target("wider", "deflate", 300)
        rest.finished("wider")
        now_mib = int(flags(service, "SoftMaxHeapSize")["SoftMaxHeapSize"]) / 2**20
        assert now_mib == pytest.approx(limit_mib, abs=0.01)  # a deflation never raises


def test_a_new_adapter_still_restores_the_very_original_values(start: Start, tmp_path: Path) -> None:
    service = start((*G1, "-XX:MinHeapFreeRatio=33", "-XX:MaxHeapFreeRatio=66", "-XX:G1PeriodicGCInterval=7777"))
    originals = flags(service, *MANAGED)
    with hooked(service, tmp_path) as rest:
        service.say("cache 0")
        for i, target_mib in enumerate((200, 120)):
            rest.target(f"down{i}", "deflate", target_mib)
            rest.finished(f"down{i}")
        assert flags(service, *MANAGED) != originals
    with hooked(service, tmp_path) as rest:
        maximum_mib = rest.capabilities()["resources"]["memory_mib"]["maximum"]
        rest.target("half", "reinflate", 200)
        rest.finished("half")
        assert flags(service, *MANAGED) != originals
        rest.target("up", "reinflate", maximum_mib)
        rest.finished("up")
        assert flags(service, *MANAGED) == originals

"""Our own limit on a tap: the commands, what is read, and that a failure half way leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostagent.errors import TrafficControlError
from hostagent.limits.tc import LEAST_BURST, Shape, Tap, TrafficControl, change_steps, parse, run, setup_steps
from tests.hostagent.fake_kernel import FakeKernel

TAP = Tap("vnet7")
FREE = ("noqueue", "8001:", 0)
MIB = 1 << 20
# As tc of iproute2 6.1 prints it.
LIMITED = """[{"kind":"tbf","handle":"ebb0:","dev":"vnet7","root":true,"refcnt":2,"options":{"rate":8388608,
"burst":262135,"lat":100000}},{"kind":"ingress","handle":"ffff:","dev":"vnet7","parent":"ffff:fff1","options":{}},{"kind":"tbf",
"handle":"ebb0:","dev":"IFB","root":true,"refcnt":2,"options":{"rate":4194304,"burst":262135,"lat":100000}}]
[{"protocol":"all","pref":1,"kind":"u32","chain":0},{"protocol":"all","pref":1,"kind":"u32","chain":0,"options":{"fh":
"800:","ht_divisor":1}},{"protocol":"all","pref":1,"kind":"u32","chain":0,"options":{"fh":"800::800","match":{"value":
"0","mask":"0","offmask":"","off":0},"actions":[{"order":1,"kind":"mirred","mirred_action":"redirect","direction":
"egress","to_dev":"IFB","control_action":{"type":"stolen"},"index":1,"ref":1,"bind":1}]}}]
""".replace("IFB", TAP.ifb)


def control(kernel: FakeKernel, tmp_path: Path) -> TrafficControl:
    for directory in ("netns", "net"):
        (tmp_path / directory).mkdir(exist_ok=True)
    return TrafficControl(kernel.run, tmp_path / "netns", tmp_path / "net")


def test_both_directions_are_read_from_what_tc_prints() -> None:
    shape = parse(LIMITED, TAP)
    assert shape == Shape(8 * MIB, 4 * MIB, ("tbf", "ebb0:"), ingress=True, redirected=True)
    assert shape.ours
    assert shape.rate == 8 * MIB


def test_a_direction_that_is_not_redirected_any_more_counts_as_free() -> None:
    shape = parse(LIMITED.replace(f'"to_dev":"{TAP.ifb}"', '"to_dev":"eth0"'), TAP)
    assert shape.from_guest is None
    assert shape.rate is None
    assert not shape.ours


@pytest.mark.parametrize("root", ['"kind":"pfifo_fast","handle":"0:"', '"kind":"noqueue","handle":"8004:"'])
def test_what_the_kernel_or_libvirt_put_on_a_free_tap_is_nobodys(root: str) -> None:
    assert parse(f'[{{{root},"dev":"vnet7","root":true,"options":{{}}}}]\n[]\n', TAP) == Shape()


@pytest.mark.parametrize("text", ["", "[]", "[{}] []", "nonsense", '{"a": 1} []', '[{"dev":"vnet7"}] [1]'])
def test_an_answer_that_is_not_tcs_is_an_error(text: str) -> None:
    with pytest.raises(TrafficControlError, match="cannot be read"):
        parse(text, TAP)


@given(st.text(min_size=1, max_size=15), st.text(min_size=1, max_size=15))
def test_every_tap_has_an_ifb_device_of_its_own_whose_name_the_kernel_takes(one: str, other: str) -> None:
    assert len(Tap(one).ifb) <= 15
    assert (Tap(one).ifb == Tap(other).ifb) == (one == other)


@pytest.mark.parametrize("bytes_s", [MIB, 8 * MIB, 3 << 30])
def test_a_bucket_takes_the_largest_packet_of_a_guest_and_what_is_due_when_a_timer_is_late(bytes_s: int) -> None:
    buckets = [" ".join(step.do) for step in setup_steps(TAP, bytes_s) if "tbf" in step.do]
    burst = max(LEAST_BURST, bytes_s // 50)
    assert [bucket.split(" dev ")[1].split()[0] for bucket in buckets] == [TAP.ifb, TAP.name]
    assert all(f"tbf rate {bytes_s}bps burst {burst} latency" in bucket for bucket in buckets)


def test_commands_for_a_tap_in_a_namespace_are_run_in_there() -> None:
    inside = Tap("vnet7", "other")
    for step in [*setup_steps(inside, MIB), *change_steps(inside, Shape(), MIB)]:
        for argv in filter(None, (step.do, step.undo)):
            assert argv[1:3] == ("-n", "other")


async def test_a_limit_is_set_changed_and_lifted(tmp_path: Path) -> None:
    kernel = FakeKernel({"vnet7": FREE})
    tc = control(kernel, tmp_path)
    await tc.limit(TAP, 8 * MIB)
    assert (await tc.look(TAP)).rate == 8 * MIB
    kernel.commands.clear()
    await tc.limit(TAP, 2 * MIB)
    assert (await tc.look(TAP)).rate == 2 * MIB
    # There is no moment without a limit.
    assert all("replace" in line for line in kernel.commands)
    await tc.lift(TAP)
    await tc.lift(TAP)
    assert kernel.state() == ({"vnet7": FREE}, {})


@pytest.mark.parametrize("done_nevertheless", [False, True])
@pytest.mark.parametrize("fails", range(len(setup_steps(TAP, MIB))))
async def test_a_limit_that_fails_half_way_leaves_nothing(tmp_path: Path, fails: int, done_nevertheless: bool) -> None:
    kernel = FakeKernel({"vnet7": FREE}, fails=fails, done_nevertheless=done_nevertheless)
    with pytest.raises(TrafficControlError, match="no memory"):
        await control(kernel, tmp_path).limit(TAP, MIB)
    assert kernel.state() == ({"vnet7": FREE}, {})


@pytest.mark.parametrize("done_nevertheless", [False, True])
@pytest.mark.parametrize("fails", range(2))
async def test_a_change_that_fails_half_way_leaves_the_limit_that_was(
    tmp_path: Path, fails: int, done_nevertheless: bool
) -> None:
    kernel = FakeKernel({"vnet7": FREE})
    tc = control(kernel, tmp_path)
    await tc.limit(TAP, 8 * MIB)
    before = kernel.state()
    kernel.commands.clear()
    kernel.fails, kernel.done_nevertheless = fails, done_nevertheless
    with pytest.raises(TrafficControlError):
        await tc.limit(TAP, MIB)
    assert kernel.state() == before


async def test_a_caller_that_is_cancelled_half_way_leaves_nothing(tmp_path: Path) -> None:
    kernel = FakeKernel({"vnet7": FREE})
    stuck = asyncio.Event()

    async def stuck_at_the_filter(argv: tuple[str, ...], text: str = "") -> str:
        if "filter" in argv:
            stuck.set()
            await asyncio.Event().wait()
        return await kernel.run(argv, text)

    tc = TrafficControl(stuck_at_the_filter, tmp_path, tmp_path)  # type: ignore[arg-type]
    task = asyncio.create_task(tc.limit(TAP, MIB))
    await stuck.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert kernel.state() == ({"vnet7": FREE}, {})


async def test_what_a_killed_agent_left_half_done_is_made_whole(tmp_path: Path) -> None:
    for steps in range(1, len(setup_steps(TAP, MIB))):
        kernel = FakeKernel({"vnet7": FREE})
        for step in setup_steps(TAP, 8 * MIB)[:steps]:
            await kernel.run(step.do)
        tc = control(kernel, tmp_path)
        await tc.limit(TAP, MIB)
        assert (await tc.look(TAP)).rate == MIB


@pytest.mark.parametrize(
    ("root", "ingress"), [(("htb", "1:", 0), {}), (("tbf", "8003:", MIB), {}), (FREE, {"vnet7": "eth0"})]
)
async def test_somebody_elses_qdisc_is_left_alone(
    tmp_path: Path, root: tuple[str, str, int], ingress: dict[str, str]
) -> None:
    kernel = FakeKernel({"vnet7": root}, dict(ingress))
    with pytest.raises(TrafficControlError, match="another program"):
        await control(kernel, tmp_path).limit(TAP, MIB)
    assert kernel.state() == ({"vnet7": root}, ingress)
    assert kernel.commands == []


async def test_a_tap_is_found_in_the_hosts_namespace_first_and_else_in_one_that_has_a_name(tmp_path: Path) -> None:
    tc = control(FakeKernel({"vnet7": FREE}), tmp_path)
    with pytest.raises(TrafficControlError, match="no network namespace"):
        await tc.find("vnet7")
    (tmp_path / "netns" / "other").touch()
    assert await tc.find("vnet7") == Tap("vnet7", "other")
    (tmp_path / "net" / "vnet7").touch()
    assert await tc.find("vnet7") == Tap("vnet7")


async def test_a_tap_that_is_gone_is_looked_for_only_where_it_was_found(tmp_path: Path) -> None:
    """The packaged unit forbids to enter a namespace: each one that somebody had made was a warning for each tap."""
    asked: list[str] = []
    kernel = FakeKernel({"vnet7": FREE})

    async def run(argv: Sequence[str], text: str = "") -> str:
        if argv[1] == "-n":
            asked.append(argv[2])
        return await kernel.run(argv, text)

    tc = TrafficControl(run, tmp_path / "netns", tmp_path / "net")
    for directory in ("netns/other", "netns/somebodys", "net/vnet7"):
        (tmp_path / directory).mkdir(parents=True)
    await tc.limit(await tc.find("vnet7"), MIB)
    await tc.forget("vnet7")
    assert (kernel.devices, asked) == ({"vnet7": FREE}, [])
    (tmp_path / "net/vnet7").rmdir()
    await tc.limit(await tc.find("vnet7"), MIB)
    await tc.forget("vnet7")
    assert (kernel.devices, set(asked)) == ({"vnet7": FREE}, {"other"})


async def test_a_sweep_removes_only_our_devices_whose_tap_is_gone(tmp_path: Path) -> None:
    gone, here = Tap("vnet8"), Tap("vnet9")
    kernel = FakeKernel(dict.fromkeys((gone.ifb, here.ifb, "ifb0"), FREE))
    kernel.aliases = {gone.ifb: "ebbtide vnet8", here.ifb: "ebbtide vnet9", "ifb0": "ebbtide vnet8"}
    tc = control(kernel, tmp_path)
    (tmp_path / "net" / "vnet9").touch()
    await tc.sweep()
    assert set(kernel.devices) == {here.ifb, "ifb0"}


async def test_a_command_that_fails_is_told_in_its_own_words() -> None:
    assert await run(["cat"], "text") == "text"
    with pytest.raises(TrafficControlError, match=r"sh -c .* failed: no such thing"):
        await run(["sh", "-c", "echo no such thing >&2; exit 2"])
    with pytest.raises(TrafficControlError, match="cannot be run: No such file"):
        await run(["/nonexistent/tc"])


async def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostagent.limits.tc.COMMAND_LIMIT_S", 0.2)
    with pytest.raises(TrafficControlError, match="did not end"):
        await run(["sleep", "60"])

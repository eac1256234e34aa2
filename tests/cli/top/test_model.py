"""The model of `ebb top` without a terminal: answers and keys in, lines out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.cli.top.columns import HOSTS, VMS
from ebbtide.cli.top.drawing import bar, cleaned, figure, fitted, text_of
from ebbtide.cli.top.model import Top, View
from ebbtide.client.connection import Changed
from ebbtide.messages.explanations import VMExplanation
from tests.cli.top.pictures import NOW, cluster, event, host, names, picture, press, vm


def test_the_first_lines_count_hosts_and_vms_and_add_their_sizes_up() -> None:
    first, cpu, memory = picture(cluster(), 160)[:3]
    assert "3 hosts: 2 ready, 1 silent; 4 VMs: 3 running, 1 preempted" in first
    assert "9/16 cores held, 2 deflatable, 2 taken" in cpu
    assert "16/32 GiB held, 4 deflatable" in memory


def test_a_host_that_falls_silent_is_counted_in_words_and_left_out_of_the_bars_with_its_vms() -> None:
    top = cluster()
    top.put_hosts(Changed([host("host-a", 1.0, state="silent")], is_whole=False, changes=6))
    first, cpu, memory = picture(top, 160)[:3]
    assert "3 hosts: 2 silent, 1 ready; 4 VMs: 3 running, 1 preempted" in first
    assert "2/8 cores held, 1 deflatable, 0.5 taken" in cpu
    assert "8/16 GiB held, 2 deflatable" in memory


def test_hosts_are_sorted_by_how_full_they_are_and_a_key_turns_that_round() -> None:
    top = cluster()
    assert names(top) == ["host-a", "host-c", "host-b"]
    assert names(press(top, "r")) == ["host-b", "host-c", "host-a"]


def test_vms_that_gave_most_come_first_and_any_column_can_be_sorted_by() -> None:
    top = cluster(View.VMS)
    assert names(top)[:2] == ["db", "batch-1"]
    assert names(press(top, "<", "<", "<")) == ["batch-1", "batch-2", "db", "web"]
    assert names(press(top, "r")) == ["web", "db", "batch-2", "batch-1"]


def test_the_cursor_stays_with_its_row_when_others_move_past_it() -> None:
    top = press(cluster(View.VMS), "down")
    assert "batch-1" in _selected(top)
    top.put_vms(Changed([vm("web", 0.6)], is_whole=False, changes=6))
    assert names(top)[:3] == ["db", "web", "batch-1"]
    assert "batch-1" in _selected(top)


def _selected(top: Top) -> str:
    (line,) = [line for line in top.lines(80, 24, NOW) if any(style == "selected" for _, style in line)]
    return text_of(line)


def test_enter_goes_from_a_host_to_its_vms_to_the_layers_of_one_and_escape_back() -> None:
    top = press(cluster(), "end", "enter")
    assert set(names(top)) == {"batch-1", "batch-2"}
    press(top, "enter")
    assert top.detail == "batch-1"
    assert "its host is asked ..." in "\n".join(picture(top))
    told = VMExplanation(
        host="host-b", state="running", sentence="took 0.5 cores", explanation=None, unreachable="host-b is silent"
    )
    top.put_layers("batch-1", told)
    shown = "\n".join(picture(top))
    assert "layers of batch-1" in shown
    assert "took 0.5 cores\nhost-b is silent" in shown
    press(top, "escape")
    assert top.detail is None
    assert top.view is View.VMS
    press(top, "escape")
    assert names(top) == ["host-a", "host-c", "host-b"]


def test_layers_that_come_for_another_vm_are_dropped() -> None:
    top = press(cluster(View.VMS), "enter")
    top.put_layers("web", "there is no VM named web")
    assert "there is no VM" not in "\n".join(picture(top))
    top.put_layers("db", "there is no VM named db")
    assert "there is no VM named db" in "\n".join(picture(top))


def test_a_filter_is_typed_taken_and_cleared() -> None:
    top = press(cluster(View.VMS), "/", *"BATCHx", "backspace")
    assert picture(top)[-1].startswith("/BATCH_")
    assert len(names(top)) == 4
    press(top, "enter")
    assert set(names(top)) == {"batch-1", "batch-2"}
    press(top, "/", *" preempted", "enter")
    assert names(top) == ["batch-2"]
    assert "filter 'BATCH preempted': 1 VMs" in picture(top)[-1]
    press(top, "/", "q", "escape")
    assert not top.over
    assert len(names(press(top, "escape"))) == 4


def test_events_stand_below_the_last_one_at_the_bottom() -> None:
    top = cluster()
    for number in range(1, 20):
        top.put_event(event(number, f"sentence {number}"))
    shown = picture(top)
    assert shown[-2].endswith("sentence 19")
    assert sum("sentence" in line for line in shown) == 7


def test_what_is_gone_leaves_and_a_whole_list_takes_the_place_of_all() -> None:
    top = cluster(View.VMS)
    top.put_vms(Changed([], gone=("db",), is_whole=False, changes=7))
    assert set(names(top)) == {"web", "batch-1", "batch-2"}
    assert top.vms_since == 7
    top.put_vms(Changed([vm("new")], changes=8))
    assert names(top) == ["new"]


def test_a_manager_that_does_not_answer_leaves_the_old_figures_and_says_so_until_it_does() -> None:
    top = cluster()
    top.fail("no manager answers at http://127.0.0.1:7100")
    assert picture(top)[-1].startswith("old figures: no manager answers")
    assert len(names(top)) == 3
    top.put_hosts(Changed([], is_whole=False, changes=6))
    assert picture(top)[-1].startswith("q quit")


def test_before_the_first_answer_it_says_that_it_asks_and_afterwards_that_there_is_nothing() -> None:
    top = Top("http://127.0.0.1:7100")
    assert "the manager is asked ..." in picture(top)[4]
    top.put_hosts(Changed([], changes=1))
    assert picture(top)[4] == "there are no hosts"


@pytest.mark.parametrize("columns", [HOSTS, VMS], ids=["hosts", "VMs"])
def test_the_columns_that_are_always_shown_fit_into_80(columns: tuple[object, ...]) -> None:
    always = [column for column in columns if column.from_width <= 80]  # type: ignore[attr-defined]
    assert sum(column.least for column in always) + len(always) - 1 <= 80  # type: ignore[attr-defined]


def test_a_wide_terminal_has_more_columns() -> None:
    narrow, wide = picture(cluster(View.VMS), 80)[3], picture(cluster(View.VMS), 160)[3]
    assert "sold as" not in narrow
    assert "sold as" in wide
    assert "db was placed" in "\n".join(picture(cluster(View.VMS), 160))


def test_a_snapshot_has_every_row_and_no_cursor() -> None:
    top = Top("http://127.0.0.1:7100")
    top.put_hosts(Changed([host(f"host-{number:03}") for number in range(300)], changes=1))
    lines = top.snapshot(80, NOW)
    assert sum(text_of(line).startswith("host-") for line in lines) == 300
    assert not any(style == "selected" for line in lines for _, style in line)


KEYS = st.lists(st.sampled_from(["up", "down", "pageup", "pagedown", "home", "end", "enter", "escape", "tab", "<", ">",
                                 "r", "/", "a", "1", "backspace", "?", "j", "k"]), max_size=40)  # fmt: skip


@given(KEYS, st.integers(1, 200), st.integers(1, 60), st.lists(st.sampled_from(["db", "web", "batch-1"]), max_size=3))
def test_any_keys_at_any_size_give_lines_that_fit(keys: list[str], width: int, height: int, gone: list[str]) -> None:
    top = cluster()
    for number, key in enumerate(keys):
        top.press(key)
        picture(top, width, height)
        if number == 5:
            top.put_vms(Changed([], gone=tuple(gone), is_whole=False, changes=9))
            picture(top, width, height)


@given(
    st.integers(2, 60),
    st.floats(0, 1e6),
    st.lists(st.floats(0, 1e6), min_size=2, max_size=2),
    st.one_of(st.none(), st.floats(0, 1e6)),
)
def test_a_bar_is_exactly_as_wide_as_asked_and_not_empty_where_something_is_held(
    width: int, most: float, parts: list[float], mark: float | None
) -> None:
    drawn = bar(width, most, [(parts[0], "#", "held"), (parts[1], "-", "taken")], mark)
    text = "".join(piece for piece, _ in drawn)
    assert len(text) == width
    assert (text[0], text[-1]) == ("[", "]")
    if mark is None and parts[0] > 0 and most > 1 and width > 2:
        assert "#" in text


def test_bars_show_shares_the_rest_and_where_the_minimum_is() -> None:
    drawn = bar(12, 2.0, [(1.0, "#", "held"), (1.0, "-", "taken")], 0.5)
    assert "".join(piece for piece, _ in drawn) == "[##|##-----]"


def test_words_of_others_are_cleaned_and_cut() -> None:
    assert cleaned("a\x1b[2Jb\nc\N{CJK UNIFIED IDEOGRAPH-6F6E}") == "a?[2Jb c?"
    assert fitted("a long name", 6) == "a lon>"
    assert [figure(value) for value in (0, 0.5, 12.34, 123.4)] == ["0", "0.5", "12.3", "123"]

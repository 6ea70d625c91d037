"""What the keys of the live screen do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.shelf.screen.sample_job import (
    HEALTHY,
    Player,
    RecordedActions,
    make_log,
    make_slow,
    make_snapshot,
    with_log,
)
from tests.shelf.screen.screen_driver import DrivenScreen, drive, shown
from vjob.jobs.monitor.model.snapshot import Line


def test_nodes_are_sorted_by_keys_and_by_a_click() -> None:
    def order(screen: DrivenScreen) -> list[str]:
        return [row.node.name for row in screen.live.nodes.rows]

    snapshot = make_snapshot(4)
    times = {"n060": 30.0, "n061": None, "n062": 500.0, "n063": 100.0}
    nodes = tuple(
        replace(node, beat_at=None if (age := times[node.name]) is None else snapshot.now - age)
        for node in snapshot.nodes
    )

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("n063")
        pane = screen.live.nodes
        place = next(item for item in pane._placed if item.column.title == "beat")
        await screen.pilot.click(pane, offset=(place.start + 1, 1))
        assert order(screen) == ["n062", "n063", "n060", "n061"]
        assert "beat▼" in screen.text()
        await screen.press("o")
        assert order(screen) == ["n060", "n063", "n062", "n061"]
        await screen.press("greater_than_sign")
        assert pane.sorted_by == "log"
        await screen.press("less_than_sign", "less_than_sign")
        assert pane.sorted_by == "state"

    drive(Player((replace(snapshot, nodes=nodes), HEALTHY)), script)


def test_the_filter_narrows_the_table_as_it_is_typed_and_escape_clears_it() -> None:
    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("n067")
        await screen.press("f", *"MASTER")
        assert [row.node.name for row in screen.live.nodes.rows] == ["n060"]
        assert "filter 'MASTER': 1" in screen.text()
        await screen.press("enter")
        assert screen.live.nodes.has_focus
        await screen.press("escape")
        assert len(screen.live.nodes.rows) == 8
        await screen.press("f", *"nothing like it", "escape")
        assert len(screen.live.nodes.rows) == 8 and not screen.live.prompt.display

    drive(Player((make_snapshot(8), HEALTHY)), script)


def test_keys_typed_into_the_prompt_do_nothing_else() -> None:
    actions = RecordedActions()

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("n062")
        await screen.press("f", "q", "c", "r", "s", "z", "question_mark", "n", "slash")
        assert screen.live.prompt.value == "qcrsz?n/"
        assert actions.asked == [] and screen.app.screen is screen.live

    drive(Player((make_snapshot(3), HEALTHY)), script, actions=actions)


def test_search_finds_the_last_line_first_and_goes_on_around_the_end() -> None:
    lines = [Line(text=f"line {number}", node="n060") for number in range(100)]
    for number in (10, 50, 90):
        lines[number] = Line(text="here is a Needle", node="n060")

    async def script(screen: DrivenScreen) -> None:
        log = screen.live.log_pane
        await screen.until_shown("line 99")
        await screen.press("slash", *"needle", "enter")
        assert log.found == 90 and not log.is_following and "line 91" in shown(log)
        await screen.press("n")
        assert log.found == 50
        await screen.press("N", "N")
        assert log.found == 10
        await screen.press("slash", *"Needles", "enter")
        assert log.found is None and "no line with 'Needles'" in screen.text()

    drive(Player((make_snapshot(3), HEALTHY)), script, actions=with_log("n060", lines))


def test_e_goes_to_the_first_known_error_and_then_to_the_next() -> None:
    lines = [Line(text=f"line {number}", node="n060") for number in range(100)]
    lines[20] = Line(text="CUDA out of memory", node="n060", kind="cuda_oom", num_same=4)
    lines[80] = Line(text="NCCL watchdog", node="n060", kind="nccl_timeout")

    async def script(screen: DrivenScreen) -> None:
        log = screen.live.log_pane
        await screen.until_shown("line 99")
        await screen.press("e")
        assert log.found == 20 and "line 21: cuda_oom" in screen.text()
        assert "CUDA out of memory x4" in screen.text()
        await screen.press("e")
        assert log.found == 80
        await screen.press("e", "E")
        assert log.found == 80

    drive(Player((make_snapshot(3), HEALTHY)), script, actions=with_log("n060", lines))


def test_scrolling_up_holds_the_log_and_space_follows_again() -> None:
    actions = with_log("n060", [Line(text=f"line {number}", node="n060") for number in range(100)])

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("line 99")
        await screen.press("enter", "pageup")
        assert "held" in screen.text() and "line 99" not in screen.text()
        actions.lines.by_node["n060"].append(Line(text="line 100", node="n060"))
        await screen.until(lambda: screen.live.log_pane.buffer.end == 101)
        assert "line 100" not in screen.text()
        await screen.press("space")
        assert "following" in screen.text() and "line 100" in screen.text()

    drive(Player((make_snapshot(3), HEALTHY)), script, actions=actions)


def test_a_shows_the_log_of_all_nodes_with_their_names() -> None:
    actions = with_log(None, [*make_log("n060", 2), *make_log("n062", 2)])

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("log of n060")
        await screen.press("a")
        await screen.until_shown("log of all nodes")
        await screen.until_shown("n062 r8")
        await screen.press("down", "a")
        await screen.until_shown("log of n061")

    drive(Player((make_snapshot(3), HEALTHY)), script, actions=actions)


def test_cancel_says_what_it_does_and_only_y_does_it() -> None:
    actions = RecordedActions()

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("n062")
        await screen.press("c")
        assert "then jobs 4711+0 and 4711+1 end" in screen.text()
        await screen.press("enter", "x", "c", "r")
        assert "Cancel the job?" in screen.text()
        await screen.press("n")
        assert actions.asked == []
        await screen.press("c", "y")
        await screen.until_shown("cancel: gpt2-xl saved and left")
        assert actions.asked == ["cancel"]

    drive(Player((make_snapshot(3), HEALTHY)), script, actions=actions)


@pytest.mark.parametrize(
    ("state", "says", "wanted"),
    [("ended", "ends it", "the job is over"), ("", "", "these are only logs")],
)
def test_cancel_of_what_cannot_be_cancelled_says_so(state: str, says: str, wanted: str) -> None:
    actions = RecordedActions(cancel_text=says)
    snapshot = replace(make_snapshot(3), record_state=state)

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("n062")
        await screen.press("c")
        await screen.until_shown(wanted)

    drive(Player((snapshot, HEALTHY)), script, actions=actions)


def test_report_and_stacks_tell_what_came_of_them() -> None:
    class Broken(RecordedActions):
        def report(self) -> str:
            raise RuntimeError("reports need pandas\nwhich is [not] installed")

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("n062")
        await screen.press("r")
        await screen.until_shown("report did not work")
        assert "which is [not] installed" in screen.text()
        await screen.press("escape", "s")
        await screen.until_shown("1 rank: wait [recv]")
        await screen.press("escape")
        assert screen.app.screen is screen.live

    drive(Player((make_snapshot(3), HEALTHY)), script, actions=Broken())


def test_help_and_the_verdict_in_full_are_pages() -> None:
    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("n064")
        await screen.press("question_mark")
        assert "the next known error in the log" in screen.text()
        await screen.press("escape", "v")
        assert "rule: straggler" in screen.text() and "0: n064 was lost" in screen.text()
        await screen.press("q")
        assert screen.app.screen is screen.live

    drive(Player(make_slow()), script)


def test_tab_moves_between_panes_and_z_shows_one_alone() -> None:
    async def script(screen: DrivenScreen) -> None:
        live = screen.live
        await screen.until_shown("n062")
        assert live.nodes.has_focus
        await screen.press("tab")
        assert live.gpus.has_focus
        await screen.press("tab")
        assert live.log_pane.has_focus
        await screen.press("z")
        assert not live.nodes.display and live.log_pane.size.height > 20
        await screen.press("shift+tab")
        assert live.gpus.display and not live.log_pane.display
        await screen.press("escape")
        assert live.nodes.display and live.log_pane.display

    drive(Player((make_snapshot(3), HEALTHY)), script)

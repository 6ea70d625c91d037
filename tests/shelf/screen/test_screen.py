"""What the live screen shows, whatever its terminal and its source are like."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from tests.shelf.screen.sample_job import (
    EMPTY,
    HEALTHY,
    Player,
    RecordedActions,
    SampleLines,
    make_log,
    make_slow,
    make_snapshot,
    with_log,
)
from tests.shelf.screen.screen_driver import DrivenScreen, drive, shown
from varuna_core.facts.finding import Finding
from vjob.jobs.monitor.model.snapshot import Gpu, Health, Line, Node, Snapshot, Verdict
from vjob.shelf.screen import theme
from vjob.shelf.screen.theme import ASCII, UNICODE

HERE = UNICODE.here
UNKNOWN = Verdict(health=Health.UNKNOWN, reason="nothing is known", main=Finding("unknown"))


def test_the_screen_shows_verdict_evidence_advice_progress_and_the_culprits_log() -> None:
    actions = with_log("n064", make_log("n064"))

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("log of n064")
        await screen.until_shown("iteration     1279/   10000")
        text = screen.text()
        for wanted in (
            "gpt2-xl-1121-183144", "4711+0 4711+1 RUNNING", "attempt 1 (1 before)", "52 min of 12",
            " SLOW  rank 17 on n064 works 3.9 s", "n064.err rank 17 | step 1275: clock held",
            "→ look at that node", "also: GPU 1 of n064", "step 1,280/10,000", "12%", "s/step",
            "to go", HERE + "●n064", "GPUs of n064  NVIDIA A10", "held down: hw_thermal", "? help",
        ):  # fmt: skip
            assert wanted in text, wanted

    app = drive(Player(make_slow()), script, actions=actions)
    assert app.exit_code == 13


def test_the_cursor_goes_to_a_culprit_until_the_user_moves_it() -> None:
    snapshot, verdict = make_slow()
    gate = threading.Event()
    gates = threading.Event()
    elsewhere = replace(verdict, node="n066")
    source = Player(
        (make_snapshot(8), HEALTHY),
        gate.wait,
        (snapshot, verdict),
        gates.wait,
        (snapshot, elsewhere),
    )

    async def script(screen: DrivenScreen) -> None:
        await screen.until(lambda: screen.live.nodes.chosen == "n060")
        gate.set()
        await screen.until(lambda: screen.live.nodes.chosen == "n064")
        await screen.press("up")
        gates.set()
        await screen.until_shown("●n066")
        assert screen.live.nodes.chosen == "n063"

    drive(source, script)


@pytest.mark.parametrize("marks", [None, ASCII], ids=["unicode", "ascii"])
def test_it_survives_every_size(marks: object) -> None:
    sizes = [(120, 36), (80, 24), (40, 10), (20, 5), (1, 1), (300, 100), (80, 24)]

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("SLOW")
        for width, height in sizes:
            await screen.pilot.resize_terminal(width, height)
            await screen.press(
                "tab", "down", "f", "escape", "question_mark", "escape", "v", "escape"
            )
            lines = screen.text().split("\n")
            assert all(len(line) <= width for line in lines), (width, height)
            assert width < 40 or "SLOW" in screen.text(), (width, height)
            assert height < 5 or len(lines) == height, (width, height)

    actions = with_log("n064", make_log("n064"))
    chosen = {"marks": ASCII} if marks else {}
    drive(Player(make_slow()), script, actions=actions, **chosen)


def test_a_small_terminal_shows_one_pane_at_a_time() -> None:
    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("SLOW")
        assert "nodes  8" in screen.text() and "log of" not in screen.text()
        await screen.press("tab", "tab")
        assert "log of n064" in screen.text() and "nodes  8" not in screen.text()

    drive(Player(make_slow()), script, size=(40, 10))


def test_thousands_of_nodes_cost_only_the_rows_that_are_seen() -> None:
    snapshot = make_snapshot(4096, gpus=8)
    culprit = replace(HEALTHY, health=Health.STALLED, node=snapshot.nodes[3000].name)

    async def script(screen: DrivenScreen) -> None:
        pane = screen.live.nodes
        await screen.until(lambda: len(pane.rows) == 4096)
        await screen.until_shown("●" + snapshot.nodes[3000].name)
        made = []
        make_row = pane.make_row
        pane.make_row = lambda number: made.append(number) or make_row(number)  # type: ignore[func-returns-value, method-assign]
        await screen.press("home", "end", "pageup", "o")
        assert 0 < len(made) <= 8 * pane.page
        assert "of 4,096" in screen.text()

    drive(Player((snapshot, culprit)), script, interval_s=60)


def test_without_unicode_everything_is_ascii() -> None:
    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("learning ???")
        for page in ("", "question_mark", "v", "c"):
            await screen.press(*filter(None, [page]))
            assert screen.text().isascii(), page
            await screen.press("escape")

    actions = with_log("n064", [Line(text="learning 한국어", node="n064")])
    drive(Player(make_slow()), script, actions=actions, marks=ASCII)


def test_without_colour_the_words_say_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(screen: DrivenScreen) -> None:
        assert screen.app.no_color
        await screen.until_shown(" SLOW  rank 17")
        assert HERE + "●n064" in screen.text()
        screen.app.export_screenshot()

    drive(Player(make_slow()), script)


@pytest.mark.parametrize("light", [True, False])
def test_a_light_terminal_gets_light_colours(light: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLORFGBG", "0;15" if light else "15;0")
    drawn = []

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown(" SLOW  rank 17")
        drawn.append(screen.app.export_screenshot())

    drive(Player(make_slow()), script)
    dark = [colour for colour in theme.ON_LIGHT if colour not in theme.ON_LIGHT.values()]
    assert any(colour in drawn[0] for colour in dark) is not light
    assert (theme.ON_LIGHT[theme.PANEL] in drawn[0]) is light


def test_text_of_logs_is_never_markup_and_never_steers_the_terminal() -> None:
    evil = (
        "[red]no[/] [/] [0] NVIDIA A10 [@click=app.quit]x[/] \x1b]0;title\x07 \x9b31m a\nb :smile:"
    )
    harmless = "[red]no[/] [/] [0] NVIDIA A10 [@click=app.quit]x[/] \\x1b]0;title\\x07 \\x9b31m a b"
    line = Line(text=evil, node=evil, file=evil, kind="x")
    gpu = Gpu(index=evil, name=evil, utilization=50.0, throttle=evil)
    node = Node(name=evil, group=evil, phase=evil, gpus=(gpu,), gpus_at=EMPTY.now)
    snapshot = replace(
        EMPTY, run=evil, nodes=(node,), errors=(line,), info={evil: evil}, scheduler_lines=(evil,)
    )
    verdict = Verdict(
        health=Health.FAILING, reason=evil, main=Finding(evil), evidence=(line,), facts=(evil,),
        advice=evil, node=evil, remarks=(evil,), phase=evil,
    )  # fmt: skip
    actions = RecordedActions(
        lines=SampleLines(by_node={evil: [line]}), stacks_text=evil + "\n" + evil, cancel_text=evil
    )

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("log of")
        await screen.until(lambda: screen.live.log_pane.num_rows == 1)
        await screen.press("f", *"[red]", "enter")
        await screen.press("slash", *"[/]", "enter")
        for key in ("", "v", "c", "s"):
            await screen.press(*filter(None, [key]))
            await screen.until_shown(harmless[:12])
            assert screen.text().replace("\n", "").isprintable(), key
            screen.app.export_screenshot()
            await screen.press("escape")
        assert harmless in shown(screen.live.log_pane)

    drive(Player((snapshot, verdict)), script, actions=actions, size=(400, 40))


def test_a_read_that_hangs_leaves_a_screen_that_answers_and_says_how_old_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vjob.shelf.screen.live.LEAST_LATE_S", 0.1)
    gate = threading.Event()

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("the file system or the scheduler does not answer")
        assert "everything shown is" in screen.text() and "HEALTHY" in screen.text()
        await screen.press("down", "question_mark")
        assert "keys" in screen.text()
        await screen.press("escape")
        gate.set()
        await screen.until_shown("SLOW")
        await screen.until(lambda: "does not answer" not in screen.text())

    drive(Player((make_snapshot(8), HEALTHY), gate.wait, make_slow()), script)


def test_leaving_does_not_wait_for_a_read_that_hangs() -> None:
    gate = threading.Event()

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("reading")
        await screen.press("q")

    app = drive(Player(gate.wait, (make_snapshot(3), HEALTHY)), script)
    assert app.exit_code == 11
    gate.set()


def test_a_source_that_raises_is_told_and_asked_again() -> None:
    source = Player(
        OSError("Stale file handle"), (make_snapshot(3), HEALTHY), ValueError("bad [x]")
    )

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("bad [x]")
        assert "HEALTHY" in screen.text() and "everything shown is" in screen.text()

    drive(source, script)


def test_lines_that_cannot_be_read_are_told_in_their_pane() -> None:
    class Broken(SampleLines):
        def read_new(self, node: str | None) -> list[Line]:
            raise OSError("Stale file handle")

    async def script(screen: DrivenScreen) -> None:
        await screen.until(lambda: "Stale file handle" in shown(screen.live.log_pane))

    drive(Player((make_snapshot(3), HEALTHY)), script, actions=RecordedActions(lines=Broken()))


def test_an_ended_job_stays_on_the_screen_with_its_last_verdict() -> None:
    dead = Verdict(
        health=Health.DEAD, reason="rank 5 on n061 was killed", main=Finding("dead"), node="n061"
    )
    ended = replace(make_snapshot(3), record_state="ended")

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("DEAD  rank 5 on n061 was killed")
        assert " to go" not in screen.text() and screen.app.is_running
        assert screen.live.looked_at is not None
        screen.live.looked_at -= 20  # it is looked at every 30 s
        screen.live.poll_age()
        assert "old" not in screen.text()
        await screen.press("q")

    app = drive(Player((make_snapshot(3), HEALTHY), (ended, dead)), script)
    assert app.exit_code == 10


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (40, 10)])
def test_a_snapshot_of_which_nothing_is_known_is_shown(size: tuple[int, int]) -> None:
    bare = replace(EMPTY, nodes=(Node(name="a"), Node(name="b")))

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("UNKNOWN")
        await screen.press("tab", "tab", "tab", "v", "escape", "e", "n", "o", "enter", "z")

    for snapshot in (EMPTY, bare):
        app = drive(Player((snapshot, UNKNOWN)), script, size=size)
        assert app.exit_code == 11


def test_nothing_new_draws_nothing() -> None:
    source = Player((make_snapshot(64), HEALTHY))

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("n070")
        await screen.until(lambda: source.num_reads > 2)
        drawn: list[object] = []
        for pane in screen.live.query("Pane"):
            pane.refresh = lambda *args, **kwargs: drawn.append(args)  # type: ignore[method-assign]
        before = source.num_reads
        await screen.until(lambda: source.num_reads > before + 2)
        assert drawn == []

    drive(source, script)


def test_a_new_line_draws_the_log_alone() -> None:
    actions = with_log("n060", [Line(text="first", node="n060")])
    source = Player((make_snapshot(64), HEALTHY))

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("first")
        await screen.until(lambda: source.num_reads > 2)
        nodes = shown(screen.live.nodes)
        actions.lines.by_node["n060"].append(Line(text="second", node="n060"))
        await screen.until_shown("second")
        assert shown(screen.live.nodes) == nodes

    drive(source, script, actions=actions)


def test_nodes_that_come_later_are_added_and_those_missing_counted() -> None:
    whole = make_snapshot(8)
    half: Snapshot = replace(whole, nodes=whole.nodes[:3])
    gate = threading.Event()

    async def script(screen: DrivenScreen) -> None:
        await screen.until_shown("nodes  3 of 8")
        gate.set()
        await screen.until_shown("nodes  8")
        assert "n067" in screen.text()

    drive(Player((half, HEALTHY), gate.wait, (whole, HEALTHY)), script)

"""The pure parts of the screen: signs, figures, columns, heights, the log's buffer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import ROOT
from tests.shelf.screen.sample_job import EMPTY, HEALTHY, NOW, make_slow, make_snapshot
from varuna_core.facts.finding import Finding
from varuna_core.facts.hang import Hang, HangWitness
from varuna_core.records.exits import RankExit
from vjob.jobs.monitor.model.snapshot import (
    Gpu,
    Health,
    JobRow,
    Line,
    Phase,
    Progress,
    Rank,
    Scheduler,
    Verdict,
)
from vjob.jobs.monitor.rules.judge import judge
from vjob.shelf.screen import theme
from vjob.shelf.screen.heading import format_jobs, render_heading
from vjob.shelf.screen.live import PANES, arrange_panes, count_most_heading
from vjob.shelf.screen.log_pane import LogBuffer, find_spans
from vjob.shelf.screen.pages import KEYS
from vjob.shelf.screen.table_pane import place_columns, render_row
from vjob.shelf.screen.theme import ASCII, UNICODE, Marks, choose_marks
from vjob.shelf.view.formats import format_age, format_coarse_duration, format_loss, format_seconds
from vjob.shelf.view.job import NODE_COLUMNS, NodeRow, View
from vjob.shelf.view.table import Column, Order


@pytest.mark.parametrize(
    ("counted", "first", "shown"),
    [(True, 401, "+30"), (True, 1, "30"), (False, 401, "30"), (True, None, "30")],
)
def test_steps_counted_since_a_resume_have_a_sign(
    counted: bool, first: int | None, shown: str
) -> None:
    """The node table said 30 beside the training's step 430."""
    snapshot = make_snapshot(1)
    ranks = tuple(replace(rank, step=30, is_counted=counted) for rank in snapshot.ranks)
    progress = Progress(step=430, first_step=first, done=30)
    view = View.make(replace(snapshot, ranks=ranks, progress=progress), HEALTHY)
    step = next(column for column in NODE_COLUMNS if column.title == "step")
    assert step.show(view.rows[0]).text == shown


NUMBERS = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))
MARKS = st.sampled_from([UNICODE, ASCII])


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"LANG": "en_US.UTF-8"}, UNICODE),
        ({"LANG": "C.utf8"}, UNICODE),
        ({"LANG": "C"}, ASCII),
        ({}, ASCII),
        ({"LC_CTYPE": "C.UTF-8"}, ASCII),
        ({"LC_CTYPE": "C.UTF-8", "LANG": "C"}, ASCII),
        ({"LC_CTYPE": "C.UTF-8", "LANG": "de_DE.UTF-8"}, UNICODE),
        ({"LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}, ASCII),
        ({"LC_CTYPE": "ko_KR.UTF-8", "LANG": "C"}, UNICODE),
        ({"LANG": "ko_KR.eucKR"}, ASCII),
    ],
)
def test_unicode_is_used_where_the_users_locale_has_it(
    environ: dict[str, str], wanted: Marks
) -> None:
    assert choose_marks(environ) is wanted


@given(marks=MARKS, values=st.lists(NUMBERS), width=st.integers(-2, 80))
def test_a_sparkline_has_a_cell_for_each_value_that_fits(
    marks: Marks, values: list[float | None], width: int
) -> None:
    assert len(marks.spark(values, width)) == max(0, min(width, len(values)))
    assert len(marks.curve(values, width)) == max(0, min(width, len(values)))


def test_a_sparkline_rises_with_its_values_and_shows_gaps() -> None:
    assert UNICODE.spark([0, 1, None, math.nan, 7], 9) == "▁▂  █"
    assert ASCII.spark([0.0, 50.0, 100.0], 9, top=100) == "_=#"
    assert UNICODE.spark([3, 3], 9) == "▁▁"
    assert UNICODE.curve([0, 0, 7, 7], 2) == "▁█"
    assert UNICODE.curve([2.3014, 2.3016, None], 9, flat=0.01) == "▁▁ "


@given(marks=MARKS, percent=st.floats(-1e9, 1e9), width=st.integers(0, 40))
def test_a_bar_is_as_wide_as_asked(marks: Marks, percent: float, width: int) -> None:
    assert len(marks.bar(percent, width)) == width


@given(marks=MARKS, text=st.text(), width=st.integers(0, 30))
def test_text_is_harmless_on_one_line_and_fits(marks: Marks, text: str, width: int) -> None:
    shown = marks.fit(marks.plain(text), width)
    assert len(shown) <= width and not set(shown) & set("\n\r\t\x1b\x07\x9b")
    assert marks.is_unicode or shown.isascii()


def test_figures_read_as_one_would_say_them() -> None:
    ages = {3: "now", 59: "50s", 60: "1m", 3599: "59m", 7200: "2h", 3 * 86400: "3d"}
    assert {age: format_age(age) for age in ages} == ages
    assert format_age(None) == format_age(math.nan) == ""
    durations = {47: "45 s", 720: "12 min", 3900: "1 h 05 min", 270000: "3 d 3 h", -5: "0 s"}
    assert {seconds: format_coarse_duration(seconds) for seconds in durations} == durations
    steps = {0.0421: "0.042", 2.3: "2.30", 14.25: "14.2", 130.4: "130"}
    assert {seconds: format_seconds(seconds) for seconds in steps} == steps
    assert (format_loss(3.86891234), format_loss(math.nan)) == ("3.8689", "nan")


@given(
    height=st.integers(0, 200),
    active=st.sampled_from(PANES),
    is_zoomed=st.booleans(),
    num_nodes=st.integers(0, 5000),
    num_gpus=st.integers(0, 16),
)
def test_panes_share_all_lines_and_the_active_one_is_seen(
    height: int, active: str, is_zoomed: bool, num_nodes: int, num_gpus: int
) -> None:
    lines = height - count_most_heading(height) - 1
    heights = arrange_panes(
        lines, active=active, is_zoomed=is_zoomed, num_nodes=num_nodes, num_gpus=num_gpus
    )
    shares = (heights.nodes, heights.gpus, heights.log)
    assert sum(shares) == max(0, lines) and min(shares) >= 0
    assert lines <= 0 or getattr(heights, active) > 0


@given(most=st.integers(1, 30), batches=st.lists(st.integers(0, 50), max_size=12))
def test_the_buffer_keeps_the_last_lines_under_their_numbers(most: int, batches: list[int]) -> None:
    buffer = LogBuffer(most)
    written: list[Line] = []
    for size in batches:
        new = [Line(text=str(len(written) + number)) for number in range(size)]
        written += new
        buffer.add(new)
        assert buffer.end == len(written) and buffer.end - buffer.first == min(most, len(written))
        assert [buffer[n].text for n in range(buffer.first, buffer.end)] == [
            line.text for line in written[-most:]
        ]


@given(
    texts=st.lists(st.sampled_from(["a", "Ab", "ab", "c"]), max_size=8),
    wanted=st.sampled_from(["a", "A", "ab", "x"]),
    start=st.integers(-1, 9),
    direction=st.sampled_from([1, -1]),
)
def test_a_search_finds_what_is_there_wherever_it_starts(
    texts: list[str], wanted: str, start: int, direction: int
) -> None:
    buffer = LogBuffer()
    buffer.add([Line(text=text) for text in texts])
    found = buffer.find(wanted, start, direction)
    fits = [bool(find_spans(text, wanted)) for text in texts]
    assert (found is not None) == any(fits)
    assert found is None or fits[found]


def test_columns_give_way_in_their_order_and_rows_never_outgrow_the_screen() -> None:
    snapshot, verdict = make_slow()
    rows = View.make(snapshot, verdict).rows
    before: set[str] = set()
    for width in range(4, 200):
        placed = place_columns(NODE_COLUMNS, rows, width)
        titles = {item.column.title for item in placed}
        assert before <= titles
        before = titles
        line = render_row(
            rows[4], placed, is_here=True, flag=(UNICODE.culprit, theme.BAD), marks=UNICODE
        )
        assert len(line.plain.rstrip()) <= width
    assert before == {column.title for column in NODE_COLUMNS} - {"CPU"}


@pytest.mark.parametrize("column", NODE_COLUMNS, ids=lambda column: column.title)
def test_every_column_sorts_with_what_is_unknown_last(column: Column[NodeRow]) -> None:
    title = column.title
    snapshot, verdict = make_slow()
    blank = replace(snapshot.nodes[2], name="blank", ranks=(), gpus=(), group="", phase="")
    blank = replace(blank, beat_at=None, log_at=None, cpu_percent=None)
    nodes = (*snapshot.nodes[:2], blank, *snapshot.nodes[2:])
    rows = View.make(replace(snapshot, nodes=nodes), verdict).rows
    for is_down in (False, True):
        ordered = Order[NodeRow]().sort(NODE_COLUMNS, rows, title, is_down)
        assert sorted(row.index for row in ordered) == list(range(9))
        assert ordered[-1].node.name == "blank" or title in ("node", "error", "CPU")


def _exit(rank: int, code: int, *, stopped: bool, signal: str | None = None) -> RankExit:
    return RankExit(
        rank=rank, node="n060", code=code, signal=signal, stopped=stopped, started=NOW,
        ended=NOW + code, last_error="",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "lost", "wanted", "is_bad"),
    [
        ([], None, "running", False),
        ([], "DOWN", "down", True),
        ([Rank(rank=0, process_state="D")], None, "waits for disk", True),
        ([Rank(rank=0, process_state="T"), Rank(rank=1)], None, "1 stopped", True),
        (
            [Rank(rank=0, exit=_exit(0, 137, stopped=False, signal="SIGKILL"))],
            None,
            "rank 0 SIGKILL",
            True,
        ),
        ([Rank(rank=3, exit=_exit(3, 9, stopped=False))], None, "rank 3 exited 9", True),
        ([Rank(rank=3, exit=_exit(3, 143, stopped=True))], None, "ended by us", False),
        (
            [Rank(rank=3, process_state="Z", exit=_exit(3, 0, stopped=False))],
            None,
            "running",
            False,
        ),
    ],
)
def test_a_nodes_state_is_the_worst_that_is_known(
    ranks: list[Rank], lost: str | None, wanted: str, is_bad: bool
) -> None:
    snapshot = make_snapshot(1)
    scheduler = replace(snapshot.scheduler, lost_nodes={"n060": lost} if lost else {})
    ranks = [replace(rank, node="n060") for rank in ranks]
    view = View.make(replace(snapshot, scheduler=scheduler, ranks=tuple(ranks)), HEALTHY)
    assert (view.rows[0].state, view.rows[0].is_bad) == (wanted, is_bad)


def test_a_culprit_that_is_only_a_rank_marks_its_node() -> None:
    verdict = replace(HEALTHY, health=Health.DEAD, rank=6)
    rows = View.make(make_snapshot(3), verdict).rows
    assert [row.is_culprit for row in rows] == [False, True, False]


def test_jobs_are_told_by_id_and_by_state_with_the_reason_of_a_pending_one() -> None:
    running = JobRow(id="7+0", state="RUNNING")
    pending = JobRow(id="7+1", state="PENDING", reason="Resources", start="2026-11-21T20:00:00")
    odd = JobRow(id="8", state="UNKNOWN", word="STRANGE")
    assert format_jobs(Scheduler(name="slurm", jobs=(odd,))) == "job 8 STRANGE"
    assert format_jobs(Scheduler(name="slurm", jobs=(running, pending))) == (
        "jobs 7+0 7+1 1 RUNNING, 1 PENDING (Resources, starts 2026-11-21T20:00:00)"
    )
    many = tuple(JobRow(id=str(number), state="RUNNING") for number in range(9))
    assert format_jobs(Scheduler(name="slurm", jobs=many)) == "jobs 0 1 2 3 and 5 more RUNNING"


@given(width=st.integers(1, 160), most=st.integers(1, 12))
def test_a_head_of_any_size_begins_with_the_verdict_and_fits(width: int, most: int) -> None:
    snapshot, verdict = make_slow()
    lines = render_heading(snapshot, verdict, UNICODE, width, most, notice="old")
    assert 1 <= len(lines) <= most
    assert any("SLOW" in line.plain for line in lines)


def test_a_stalled_job_shows_no_pace_and_what_lets_a_stopped_rank_go_on() -> None:
    """At 80 by 24 it had `0.209 s/step, 6 min to go`, and no word of kill -CONT."""
    hang = Hang(HangWitness.STOPPED, since=NOW - 76, seen_at=NOW - 50, rank=6, node="n061")
    snapshot = make_snapshot(4)
    ranks = [replace(x, process_state="T") if x.rank == 6 else x for x in snapshot.ranks]
    going = "\n".join(x.plain for x in render_heading(snapshot, HEALTHY, UNICODE, 80, 9))
    assert " s/step  loss" in going and "to go" in going
    said = judge(snapshot)  # its sentence has the time left
    assert " left" in said.reason
    assert "to go" not in "".join(x.plain for x in render_heading(snapshot, said, UNICODE, 80, 9))
    stopped = replace(snapshot, ranks=tuple(ranks), hang=hang)
    verdict = judge(stopped)
    most = count_most_heading(24)
    said = "\n".join(x.plain for x in render_heading(stopped, verdict, UNICODE, 80, most))
    assert verdict.health is Health.STALLED and "kill -CONT" in said
    assert " s/step  loss" not in said and "to go" not in said


def test_advice_that_is_cut_says_so() -> None:
    verdict = replace(HEALTHY, advice="do this and that " * 40)
    lines = render_heading(make_snapshot(1), verdict, UNICODE, 60, 10)
    assert any(line.plain.endswith("…") for line in lines)


def test_a_run_without_a_step_says_so_with_its_phase() -> None:
    snapshot = replace(make_snapshot(1), progress=None)
    phase = Phase(name="evaluation", since=None, line=Line(text=""))
    starting = Verdict(health=Health.STARTING, reason="x", main=Finding("x"), phase="rendezvous")
    for given_phase, wanted in ((None, "no step yet"), (phase, "no step yet; in evaluation")):
        lines = render_heading(replace(snapshot, phase=given_phase), starting, UNICODE, 80, 9)
        text = "\n".join(line.plain for line in lines)
        assert wanted in text and "STARTING rendezvous" in text


def test_after_a_morph_the_attempts_time_is_not_set_against_the_jobs_limit() -> None:
    snapshot = make_snapshot(1)
    for morphs, says in (
        ((), "52 min of 12"),
        (("from 8 x 4 to 6 x 4",), "52 min since the morph"),
    ):
        lines = render_heading(replace(snapshot, morphs=morphs), HEALTHY, UNICODE, 120, 9)
        assert says in lines[0].plain
    lines = render_heading(replace(snapshot, restarts=1), HEALTHY, UNICODE, 120, 9)
    assert "52 min since the restart" in lines[0].plain


def test_a_silent_scheduler_is_told_with_the_age_of_its_word() -> None:
    silent = Scheduler(name="slurm", problem="squeue did not answer within 10 s", age_s=75.0)
    lines = render_heading(replace(EMPTY, scheduler=silent), HEALTHY, UNICODE, 80, 9)
    assert lines[1].plain == "squeue did not answer within 10 s; its last answer is 1m old"


def test_odd_numbers_in_progress_are_shown_and_break_nothing() -> None:
    progress = Progress(step=50, num_steps=20, at=NOW + 99, points=())
    lines = render_heading(replace(EMPTY, progress=progress), HEALTHY, UNICODE, 80, 9)
    assert "step 50/20" in lines[-1].plain and "100%" in lines[-1].plain


def test_the_document_has_every_key_of_the_help() -> None:
    text = (ROOT / "docs/status.md").read_text()
    table = text[text.index("## The screen") : text.index("## All runs")]
    for keys, _ in KEYS:
        for key in keys.replace(",", " ").split():
            assert f"`{key}`" in table or key in ("arrows", "mouse"), key


def test_a_node_without_gpus_shows_its_processors_as_such() -> None:
    snapshot = make_snapshot(2)
    bare = replace(snapshot.nodes[0], gpus=(), cpu_percent=73.0)
    sampled = replace(bare, gpus=(Gpu(index="cpu", utilization=73.0),))
    for node in (bare, sampled):
        rows = View.make(replace(snapshot, nodes=(node,)), HEALTHY).rows
        assert (rows[0].utilization, rows[0].cpu_percent) == (None, 73.0)
        titles = {item.column.title for item in place_columns(NODE_COLUMNS, rows, 120)}
        assert "CPU" in titles and "GPU" not in titles


def test_rows_that_did_not_move_are_not_compared_again() -> None:
    """The list of runs sorted all of them at each look."""
    compared = 0

    class Weighed(float):
        def __lt__(self, other: float) -> bool:
            nonlocal compared
            compared += 1
            return float(self) < float(other)

    columns = (Column[float](title="n", width=3, place=0, show=lambda x, _: ("", theme.PLAIN),
                             key=Weighed),)  # fmt: skip
    order: Order[float] = Order()
    assert order.sort(columns, [2.0, 3.0, 1.0], "n", True) == [3.0, 2.0, 1.0]
    assert compared
    compared = 0
    assert order.sort(columns, [2.0, 3.0, 1.0], "n", True) == [3.0, 2.0, 1.0]
    assert not compared
    assert order.sort(columns, [2.0, 3.0, 1.0], "n", False) == [1.0, 2.0, 3.0]
    assert order.sort(columns, [2.0, 3.0, 4.0, 1.0], "n", False) == [1.0, 2.0, 3.0, 4.0]

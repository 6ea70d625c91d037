"""What the page holds: packed events as they were, figures that plotly takes, sad jobs too."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import ROOT
from tests.reports.traces import MS, ORIGIN, write_rank, write_simulated
from varuna_core.records.exits import rank_exit
from varuna_core.records.logs.training_log import Iteration, format_iteration
from varuna_core.records.runfolder import RunFolder
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.reports.analysis.accounting import CLASSES
from vjob.reports.analysis.findings import find_all
from vjob.reports.analysis.measures import Analysis, analyse
from vjob.reports.load.tables import Job, load_job
from vjob.reports.page import run_page
from vjob.reports.page.document import WEB
from vjob.reports.page.html import list_planes
from vjob.reports.page.run_figure import (
    NUM_BINS,
    build_gpu_strips,
    build_work_strips,
    draw_run,
    find_span,
)
from vjob.reports.page.run_page import (
    SECTIONS,
    draw_shares,
    draw_stages,
    draw_timers,
    draw_training,
    render_page,
)
from vjob.reports.page.sections import build_sections
from vjob.reports.page.timeline import build_lanes, build_steps


def read(folder: Path) -> tuple[Job, Analysis]:
    job = load_job(folder, more_events=10_000)
    return job, analyse(job)


def render(folder: Path, *, is_partial: bool = False) -> str:
    job, analysis = read(folder)
    findings = find_all(job, analysis)
    return render_page(job, analysis, findings, is_partial=is_partial, made_at="now")


def draw_all(job: Job, analysis: Analysis) -> list[dict[str, Any]]:
    found = [
        draw_run(job, analysis),
        draw_stages(job, analysis),
        draw_shares(analysis),
        draw_training(analysis),
        draw_timers(job),
    ]
    return [figure for figure in found if figure is not None]


def unpack(data: bytes, count: int) -> list[int]:
    """As PlaneReader of unpack.js."""
    planes = [data[at * count : (at + 1) * count] for at in range(4)]
    rows = zip(*planes, strict=True)
    return [int.from_bytes(bytes(row), "little", signed=True) for row in rows]


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_planes_hold_the_numbers(numbers: list[int]) -> None:
    assert unpack(list_planes(np.array(numbers, dtype=np.int64)), len(numbers)) == numbers


def test_what_does_not_fit_is_cut() -> None:
    assert unpack(list_planes(np.array([2**40, -(2**40)])), 2) == [2**31 - 1, -(2**31)]


def test_the_packed_events_are_those_of_the_trace(tmp_path: Path) -> None:
    schedule, costs = build_schedule("zero_bubble", 3, 5), build_even_costs(3)
    write_simulated(tmp_path, schedule, costs, steps=(1, 2), replicas=2)
    sends = [("send", 2, 0, at, at * MS, 0, MS // 2, 64, "activation") for at in range(3)]
    write_rank(tmp_path, 6, sends, stage=2, replica=2)
    job, analysis = read(tmp_path)
    lanes = build_lanes(job, analysis)
    held = {step.facts["step"]: step for step in build_steps(job, lanes)}
    assert sorted(held) == [1, 2]
    facts = held[2].facts
    data = zlib.decompress(base64.b64decode(held[2].packed))
    count, slots = facts["events"], 2 * len(lanes[""])
    counts = unpack(data[: 4 * slots], slots)
    columns = [
        unpack(data[4 * (slots + at * count) : 4 * (slots + (at + 1) * count)], count)
        for at in range(5)
    ]
    found, row = set(), 0
    for slot, number in enumerate(counts):
        now = 0
        own = [column[row : row + number] for column in columns]
        for gap, wait, work, label, micro in zip(*own, strict=True):
            kind, stage, size, what = facts["labels"][label]
            ready = now + gap + wait
            now = ready + work
            rank = lanes[""][slot // 2]["rank"]
            assert slot % 2 == (kind == "send")
            times = tuple(round(tick * facts["tick_s"] * 1e6) for tick in (ready, now))
            found.add((rank, kind, stage, micro, size, what, *times))
        row += number
    events = job.events[job.events["step"] == 2]
    begin = events["begin_s"].min()
    asked = {
        (
            *(e.rank, e.kind, e.stage, e.microbatch, e.bytes, e.what),
            *(round((time - begin) * 1e6) for time in (e.ready_s, e.end_s)),
        )
        for e in events.itertuples()
    }
    assert found == asked and row == count == len(events)


@pytest.mark.parametrize("length_ns", [0, 7, 10**18])
def test_steps_of_any_length_are_packed(tmp_path: Path, length_ns: int) -> None:
    write_rank(
        tmp_path, 0, [("F", 1, 0, 0, 0, 0, length_ns, 0, ""), ("B", 1, 0, 0, 0, 0, 0, 0, "")]
    )
    job, analysis = read(tmp_path)
    (step,) = build_steps(job, build_lanes(job, analysis))
    assert step.facts["ticks"] <= 1 << 22
    assert step.facts["ticks"] * step.facts["tick_s"] == pytest.approx(length_ns / 1e9, rel=1e-6)


def test_work_strips_show_who_works_when(tmp_path: Path) -> None:
    """Two steps of 10 ms; rank 1 works half of the first and all of the second."""
    for rank, works in enumerate([(2, 2), (5, 10)]):
        events = [
            ("F", step, 0, 0, (step - 1) * 10 * MS, 0, work * MS, 0, "")
            for step, work in enumerate(works, start=1)
        ]
        rest = [("data", e[1], 0, -1, e[4] + e[6], 0, 10 * MS - e[6], 0, "") for e in events]
        write_rank(tmp_path, rank, sorted([*events, *rest], key=lambda e: e[4]), replica=rank)
    job, analysis = read(tmp_path)
    span = find_span(job, analysis)
    assert span is not None and span.end_s == pytest.approx(0.02)
    worked, against = build_work_strips(job, span)
    assert worked.names == against.names == ["stage 0 rank 0", "stage 0 rank 1"]
    early, late = NUM_BINS // 4, 3 * NUM_BINS // 4
    assert [row[early] for row in worked.values] == pytest.approx([0.2, 0.5])
    assert [row[late] for row in worked.values] == pytest.approx([0.2, 1.0])
    assert [row[late] for row in against.values] == pytest.approx([0.2 / 0.6, 1.0 / 0.6])


def test_many_ranks_share_rows_and_the_one_that_is_off_is_seen(tmp_path: Path) -> None:
    for rank in range(600):
        work = (3 if rank == 123 else 2) * MS
        events = [("F", 1, 0, 0, 0, 0, work, 0, ""), ("data", 1, 0, -1, 0, 0, 9 * MS, 0, "")]
        write_rank(tmp_path, rank, events, replica=rank)
    job, analysis = read(tmp_path)
    span = find_span(job, analysis)
    assert span is not None
    worked, against = build_work_strips(job, span)
    assert len(worked.names) == 200 and worked.names[41] == "stage 0 ranks 123..125"
    assert against.values[41][10] == pytest.approx(1.5)
    assert against.values[40][10] == pytest.approx(1.0)


def write_gpus(path: Path, times: list[float], busy: list[float]) -> None:
    lines = [
        {"time": time, "gpus": [{"index": 0, "name": "A10", "utilization": value}]}
        for time, value in zip(times, busy, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))


def test_gpu_samples_hold_until_the_next_and_no_longer(tmp_path: Path) -> None:
    """Ten seconds apart over 100 s of steps; none after 50 s."""
    write_rank(tmp_path, 0, [("F", 1, 0, 0, 0, 0, 100_000 * MS, 0, "")])
    begin = ORIGIN / 1e9
    write_gpus(
        tmp_path / "n0.gpu.jsonl",
        [begin + 10 * at for at in range(6)],
        [10.0 * at for at in range(6)],
    )
    job, analysis = read(tmp_path)
    span = find_span(job, analysis)
    assert span is not None
    strips = build_gpu_strips(job, span, "utilization")
    assert strips is not None and strips.names == ["n0 GPU 0"]
    (row,) = strips.values
    at_s = [int(NUM_BINS * second / 100) for second in (5, 25, 75, 95)]
    assert [row[at] for at in at_s[:3]] == [0.0, 20.0, 50.0]
    assert np.isnan(row[at_s[3]])


def test_figures_are_such_as_plotly_knows(tmp_path: Path) -> None:
    """Restarts, checkpoints, GPUs, promises, curves: everything at once."""
    schedule, costs = build_schedule("1f1b", 2, 4), build_even_costs(2)
    for attempt in range(2):
        folder = tmp_path / f"attempt-{attempt}"
        shift = attempt * 10**9
        write_simulated(folder, schedule, costs, steps=range(1, 9), replicas=2, shifts_ns=(shift,))
        lines = [
            Iteration(step, 8, time_ms=15.0, losses={"lm loss": 9.0}, grad_norm=1.0)
            for step in range(1, 9)
        ]
        (folder / "n0.out").write_text("\n".join(map(format_iteration, lines)))
        write_gpus(folder / "n0.gpu.jsonl", [ORIGIN / 1e9, ORIGIN / 1e9 + 0.05], [10.0, 90.0])
    events = [
        ("checkpoint", 9, 0, -1, 2000 * MS, 0, MS, 0, ""),
        ("F", 9, 0, 0, 2000 * MS, 0, 1, 0, ""),
    ]
    write_rank(tmp_path / "attempt-1", 4, events)
    plan = {"prediction": {"step_s": 0.01, "stage_s": [0.01, 0.02]}, "name": "<b>x</b>"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    now = ORIGIN / 1e9 + 0.02
    happened = [{"time": now, "kind": kind, "nodes": 3} for kind in ("started", "<b>morph")]
    cost = {"from": "8 x 4", "to": "6 x 4", "pause_s": 12.3, "stop_s": 2.5, "reason": "n3 was lost"}
    happened.append({"time": now, "kind": "morph", **cost})
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, happened)))
    job, analysis = read(tmp_path)
    figures = draw_all(job, analysis)
    assert len(figures) == 4
    for figure in figures:
        go.Figure(figure)  # raises for what plotly does not know
        json.dumps(figure, allow_nan=False)
    texts = json.dumps(figures[0])
    for words in (
        "attempt 1 begins",
        "checkpoint in step 9",
        "&lt;b&gt;morph: nodes 3",
        "morph: from 8 x 4 to 6 x 4, 12 s: n3 was lost",
        "GPUs busy",
    ):
        assert words in texts, words
    (table,) = [item for item in build_sections(job, analysis) if item.title == "morphs"]
    morph = dict(zip(table.columns, table.rows[0], strict=True))
    assert morph["layout"] == "8 x 4 to 6 x 4" and morph["why"] == "n3 was lost"
    assert (morph["pause s"], morph["stop s"]) == ("12.3", "2.50")
    assert "load s" not in morph, "nothing is known of it"


def test_a_log_alone_says_which_key_gives_more(tmp_path: Path) -> None:
    (tmp_path / "n0.out").write_text(format_iteration(Iteration(10, 50, time_ms=15.0)) + "\n")
    page = render(tmp_path, is_partial=True)
    assert "profile.timeline: true" in page and "has not ended" in page
    assert 'id="figure-run"' in page


def test_a_run_that_has_only_begun_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"name": "young"}))
    (tmp_path / "attempt-0" / "trace").mkdir(parents=True)
    assert "There are no events to draw" in render(tmp_path, is_partial=True)


def test_ranks_that_wrote_nothing_have_lanes(tmp_path: Path) -> None:
    write_simulated(tmp_path / "attempt-0", build_schedule("1f1b", 2, 4), build_even_costs(2))
    (tmp_path / "plan.json").write_text(
        json.dumps({"groups": [{"name": "a", "count": 1, "ranks": 3}]})
    )
    job, analysis = read(tmp_path)
    assert [lane["rank"] for lane in build_lanes(job, analysis)["0"]] == [0, 1, 2]
    page = render(tmp_path)
    assert "Rank 2 wrote no trace." in page and "<td>3</td>" in page


def test_the_last_step_before_a_failure_is_named_so(tmp_path: Path) -> None:
    folder = tmp_path / "attempt-0"
    write_simulated(folder, build_schedule("1f1b", 2, 4), build_even_costs(2), steps=range(1, 6))
    (folder / "exit").mkdir()
    broken = rank_exit(1, "b", 9, stopped=False, started=0.0, ended=1.0, error="see the page",
                       exception="</td><script>alert(1)</script>")  # fmt: skip
    (folder / "exit" / "1.json").write_text(json.dumps(dataclasses.asdict(broken)))
    stopped = rank_exit(0, "a", -15, stopped=True, started=0.0, ended=1.0, error="was told to")
    (folder / "exit" / "0.json").write_text(json.dumps(dataclasses.asdict(stopped)))
    schedule, costs = build_schedule("1f1b", 2, 4), build_even_costs(2)
    write_simulated(tmp_path / "attempt-1", schedule, costs, steps=range(4, 9))
    page = render(tmp_path)
    model = re.search(r'id="model">([^<]*)<', page)
    assert model is not None
    held = json.loads(zlib.decompress(base64.b64decode(model.group(1))))
    names = {(step["attempt"], step["step"]): step["names"] for step in held["steps"]}
    assert "last before the failure" in names["0", 5] and "last" in names["1", 8]
    assert held["presets"] == ["first", "median", "slowest", "last", "last before the failure"]
    assert "was told to" not in page
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page


@settings(max_examples=20)
@given(st.binary(max_size=400))
def test_no_log_breaks_the_page(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    folder = tmp_path_factory.mktemp("noise")
    good = format_iteration(Iteration(10, 50, time_ms=15.0)).encode()
    (folder / "n0.out").write_bytes(noise + b"\n" + good + b"\n" + noise)
    (folder / "n0.gpu").write_bytes(noise)
    assert "</html>" in render(folder)


def test_the_scripts_can_stand_in_a_page() -> None:
    web = ROOT / "reports/web"
    for path in web.glob("*.js"):
        text = path.read_text()
        assert "</script" not in text and "innerHTML" not in text, path.name


NUMBERS = st.sampled_from([0, 1, 2, -1, 7, MS, 2**31, 2**53, -(2**40)])


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["F", "B", "W", "send", "</script>", ""]),
            st.sampled_from([1, 2, 2**40]),
            *[NUMBERS] * 6,
            st.sampled_from(["", "<script>", "é"]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_no_trace_breaks_the_page(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[Any, ...]]
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    write_rank(folder, 0, events)
    page = render(folder)
    assert page.count("</script>") == page.count("<script")
    job, analysis = read(folder)
    for figure in draw_all(job, analysis):
        json.dumps(figure, allow_nan=False)


def test_every_table_has_its_place_on_the_page() -> None:
    """That of the morphs had none."""
    source = Path(build_sections.__code__.co_filename).read_text()
    places = {name for places in SECTIONS.values() for kind, name, *_ in places if kind == "table"}
    assert places == set(re.findall(r'Table\(\s*title="([^"]+)"', source))


def test_a_script_without_a_trace_is_told_how_to_write_one(tmp_path: Path) -> None:
    """A key of the conf would change nothing: its program does not see it."""
    (tmp_path / "attempt-0").mkdir()
    (tmp_path / "attempt-0/n0.out").write_text("step 3\n")
    (tmp_path / "plan.json").write_text(json.dumps({"program": "script"}))
    page = render(tmp_path)
    assert "trace.step(n)" in page and "with varuna_core.trace" in page
    assert "profile.timeline" not in page and "train.log_every" not in page


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_of_time_has_a_colour(name: str) -> None:
    assert f"\n.part-{name} {{ background: " in (WEB / "page.css").read_text()


def test_a_conf_is_cut_at_a_line_before_its_secrets_are_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_simulated(tmp_path / "attempt-0", build_schedule("1f1b", 2, 4), build_even_costs(2))
    run = RunFolder(tmp_path)
    run.resolved.write_text("name: x\n" + "1" * 3 * run_page.MOST_CONF)
    held: list[str] = []
    monkeypatch.setattr(run_page, "withhold", lambda text: held.append(text) or text)
    job, _ = read(tmp_path)
    assert run_page._read_conf(dataclasses.replace(
        job, sources=dataclasses.replace(job.sources, run=run))) == "name: x"  # fmt: skip
    assert held == ["name: x"]

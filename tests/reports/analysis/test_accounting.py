"""Every second of every rank has one class: held on random runs, and counted another way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reports.traces import MS, ORIGIN, write_rank, write_simulated
from varuna_core.facts.known import value_of
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.registry import build_schedule
from vjob.reports.analysis.accounting import (
    CLASSES,
    WAITS,
    Accounting,
    account,
    describe_class,
    list_attempts,
)
from vjob.reports.analysis.measures import analyse
from vjob.reports.analysis.readings import Readings
from vjob.reports.load.tables import load_job
from vjob.reports.page.sections import explain_time

NOW = 1_700_000_000.0
KINDS = ("F", "B", "optimizer", "data", "checkpoint", "evaluate", "all-reduce", "other")
NO_WAITS = pd.DataFrame(columns=list(WAITS)).astype({name: float for name in WAITS[2:]})
NO_LOG: dict[str, Readings] = {}
NO_LINES = pd.DataFrame(columns=["attempt", "step", "took_s", "count"])


@dataclass(frozen=True)
class Made:
    """A run, and what every second of its ranks was made for."""

    history: list[dict[str, Any]]
    labels: list[str]
    ranks: dict[str, list[int]]
    steps: pd.DataFrame
    after: pd.DataFrame
    spent: dict[str, float]


def make_run(seed: int) -> Made:
    """One to three attempts, of one or two ranks and of steps that may be those of another."""
    random = Random(seed)

    def draw_s() -> float:
        return random.choice((0, random.randrange(16_000))) / 16

    now, rows, after = NOW, [], []
    history: list[dict[str, Any]] = [{"kind": "submitted", "time": now}]
    spent = dict.fromkeys(CLASSES, 0.0)
    bounds = [(random.randint(1, 4), random.randint(0, 3)) for _ in range(random.randint(1, 3))]
    labels = [str(at) for at in range(len(bounds))]
    ranks = {label: list(range(random.randint(1, 2))) for label in labels}
    for at, (label, (first, more)) in enumerate(zip(labels, bounds, strict=True)):
        is_last, num_ranks, between = at == len(labels) - 1, len(ranks[label]), draw_s()
        is_queued = at == 0 or random.random() < 0.5
        if at and is_queued:
            history.append({"kind": "requeued", "time": now})
        elif at:
            between += 1 / 16
        spent["queue" if is_queued else "lost"] += between * num_ranks
        started = now = now + between
        history.append({"kind": "started", "time": started, "attempt": at})
        again = {step for a, n in bounds[at + 1 :] for step in range(a, a + n + 1)}
        ends = {}
        for rank in ranks[label]:
            end = started + draw_s()
            spent["start"] += end - started
            for step in range(first, first + more + 1):
                sums = {kind: draw_s() for kind in KINDS}
                wait, idle = draw_s(), draw_s()
                window = sum(sums.values()) + wait + idle
                gap = window * random.choice((0, 0.25, 0.5)) if step > first else 0.0
                row = {"attempt": label, "rank": rank, "step": step, "begin_s": end + gap}
                row |= {"took_s": window - gap, "wait_s": wait, "replica": 0, "last_s": None}
                rows.append(row | {f"{kind}_s": number for kind, number in sums.items()})
                end += window
                if step in again:
                    spent["lost"] += window
                    continue
                spent["compute"] += sums["F"] + sums["B"] + sums["optimizer"]
                spent["communication"] += sums["all-reduce"]
                spent["bubble"] += wait
                spent["unknown"] += idle
                for kind in ("data", "checkpoint", "evaluate", "other"):
                    spent[kind] += sums[kind]
            ends[rank] = end
        saved = draw_s()
        now = max(ends.values()) + saved + draw_s()
        for rank, end in ends.items():
            spent["end" if is_last else "lost"] += now - end - (saved if is_last else 0.0)
            if is_last:
                after.append({"attempt": label, "rank": rank, "checkpoint": saved})
                spent["checkpoint"] += saved
        history.append({"kind": "ended", "time": now, "attempt": at, "code": int(not is_last)})
    table = pd.DataFrame(rows)
    return Made(history, labels, ranks, table, pd.DataFrame(after), spent)


def count(run: Made) -> Accounting:
    attempts = list_attempts(run.history, run.labels, {}, run.ranks, [])
    return account(attempts, run.steps, run.after, NO_WAITS, NO_LOG, NO_LINES)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_every_second_of_a_random_run_has_the_class_it_was_made_for(seed: int) -> None:
    run = make_run(seed)
    found = count(run)
    table = found.rows
    classes = table[[f"{name}_s" for name in CLASSES]]
    assert (classes >= -1e-6).all().all()
    assert np.allclose(classes.sum(axis=1), table["span_s"], atol=1e-5)
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-6) or not found.total_s
    assert found.overlap == pytest.approx(0, abs=1e-9)
    for name, spent in run.spent.items():
        assert float(table[f"{name}_s"].sum()) == pytest.approx(spent, abs=1e-4), name


@given(st.integers(0, 2**32), st.sampled_from(["took_s", "F_s", "data_s"]))
@settings(max_examples=30, deadline=None)
def test_what_two_classes_claim_is_an_error_and_not_hidden(seed: int, name: str) -> None:
    """A step that is longer than until the next one's end, or sums beyond their step."""
    run, more_s = make_run(seed), 10
    rows = run.steps
    last = rows[rows["attempt"] == run.labels[-1]]
    at = last.index[len(last) - 1]  # no step before it that could be read as early
    first = last["step"] == last["step"].min()
    if first.all():
        return
    if name == "took_s":
        before = rows.index[rows.index.get_loc(at) - 1]
        rows.loc[before, "took_s"] += rows["took_s"].sum() + more_s
    else:
        rows.loc[at, name] += rows.loc[at, "took_s"] + rows["took_s"].sum() + more_s
    found = count(run)
    table = found.rows
    classes = table[[f"{name}_s" for name in CLASSES]].sum(axis=1)
    assert np.allclose(classes - table["overlap_s"], table["span_s"], atol=1e-4)
    assert found.overlap > 0


def test_a_pipeline_waits_for_work_and_messages_apart(tmp_path: Path) -> None:
    """Ranks of an even 1F1B of two stages: a fifth of its makespan is bubble."""
    schedule = build_schedule("1f1b", 2, 4)
    write_simulated(tmp_path, schedule, build_even_costs(2), steps=(1, 2, 3))
    job = load_job(tmp_path)
    found = analyse(job).accounting
    last = job.traces.steps[job.traces.steps["step"] == 3]["last_s"]
    bubble = found.seconds["bubble"] + last.max() - last.min()  # what follows the run is no step's
    assert bubble / (bubble + found.seconds["compute"]) == pytest.approx(0.2)
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-5)


def test_a_rank_that_comes_late_to_the_sum_makes_the_others_wait(tmp_path: Path) -> None:
    """Rank 1 works 300 ms, the other 100 ms: 200 ms of its sum are waiting for work, 50 are not."""
    for rank, work in enumerate((100, 300)):
        events = []
        for step in (1, 2, 3):
            begin = step * 1000 * MS
            events.append(("F", step, 0, 0, begin, 0, work * MS, 0, ""))
            sum_ = (begin + work * MS, 0, (350 - work) * MS, 0, "gradients")
            events.append(("all-reduce", step, 0, -1, *sum_))
        write_rank(tmp_path, rank, events, replica=rank, pause_ns=650 * MS)
    found = analyse(load_job(tmp_path)).accounting
    own = found.rows.set_index("rank").loc[0]
    assert own["bubble_s"] == pytest.approx(3 * 0.2)
    assert own["communication_s"] == pytest.approx(3 * 0.05)
    assert found.rows.set_index("rank").loc[1, "communication_s"] == pytest.approx(3 * 0.05)


def write_cut_run(folder: Path) -> None:
    """Steps 1 to 8 of a second each, of which the killed ranks' traces have 5 and 4; after a save
    of step 6 the next attempt does 7 to 9, whole."""
    events: list[dict[str, Any]] = []
    for kind, at, *more in (
        ("submitted", 0), ("started", 2, 0), ("ended", 30, 0, 1), ("started", 31, 1),
        ("ended", 38, 1, 0),
    ):  # fmt: skip
        event = {"time": NOW + at, "kind": kind}
        events.append({**event, **dict(zip(("attempt", "code"), more, strict=False))})
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    plan = {"groups": [{"name": "a", "count": 1, "ranks": 2}]}
    (folder / "plan.json").write_text(json.dumps(plan))
    for attempt, traced, logged, begin in (
        (0, (5, 4), range(1, 9), 10),
        (1, (9, 9), (7, 8, 9), 34),
    ):
        own, first = folder / f"attempt-{attempt}", logged[0]
        for rank, last in enumerate(traced):
            steps = range(first, last + 1)
            begins = [(step, (begin + step - first) * 1000 * MS) for step in steps]
            work = [("F", step, 0, 0, at, 0, 900 * MS, 0, "") for step, at in begins]
            write_rank(own, rank, work, replica=rank, pause_ns=100 * MS)
        text = "".join(LINE.format(step).replace("500.0", "1000.0") for step in logged)
        (own / "n0.out").write_text(text)


def test_steps_that_killed_ranks_had_not_traced_yet_are_those_of_the_log(tmp_path: Path) -> None:
    write_cut_run(tmp_path)
    analysis = analyse(load_job(tmp_path))
    found = analysis.accounting
    rows = found.rows.set_index(["attempt", "rank"])
    for rank, traced in ((0, 5), (1, 4)):
        own = rows.loc[("0", rank)]
        assert own["compute_s"] == pytest.approx(0.9 * traced)
        assert own["steps_s"] == pytest.approx(6 - traced)
        assert own["lost_s"] == pytest.approx(2 + 30 - 18)  # steps 7 and 8, and until the end
        assert rows.loc[("1", rank), "lost_s"] == pytest.approx(1)
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-6)
    assert found.overlap == 0
    first, _ = analysis.goodput.attempts
    assert (first.last_step, first.steps_s) == (8, pytest.approx(8))
    assert first.repeated_s == pytest.approx(2)


def test_the_start_is_told_apart_by_when_ranks_and_traces_began(tmp_path: Path) -> None:
    """Rank 0 began 3 s after its job and opened its trace 5 s later; rank 1 was killed with its
    node and left no exit: its process began as the other one's."""
    write_cut_run(tmp_path)
    own = tmp_path / "attempt-1"
    (own / "exit").mkdir()
    exit = {"rank": 0, "node": "n0", "code": 0, "signal": None, "stopped": False,
            "started": NOW + 31.5, "ended": NOW + 37, "last_error": ""}  # fmt: skip
    (own / "exit" / "node-0.json").write_text(json.dumps({"exits": [exit]}))
    for rank in (0, 1):
        path = own / "trace" / f"{rank}.jsonl"
        opened = round((NOW + 32.5) * 1e9)
        text = path.read_text().replace(f'"origin":{ORIGIN}', f'"origin":{opened}')
        for step in (7, 8, 9):
            at = (34 + step - 7) * 1000 * MS
            text = text.replace(f":{at},", f":{at - 32_500 * MS},").replace(
                f",{at},", f",{at - 32_500 * MS},"
            )
        path.write_text(text)
    job = load_job(tmp_path)
    found = analyse(job).accounting
    begun = 2 * 8.0  # of the first attempt nothing but its traces tells, which opened before it
    assert found.start["checks and container"] == pytest.approx(2 * 0.5)
    assert found.start["imports"] == pytest.approx(2 * 1.0)
    assert found.start["communicators, data and loading"] == pytest.approx(2 * 1.5)
    assert found.seconds["start"] == pytest.approx(begun + 2 * 3)
    assert "of which checks and container 1 s; imports 2 s" in describe_class(found, "start")
    assert describe_class(found, "lost") == CLASSES["lost"]


LINE = " iteration {:8d}/      20 | elapsed time per iteration (ms): 500.0 | lm loss: 1.0 |\n"


def write_run(folder: Path) -> None:
    """A run as its files have it: steps 1 to 6, an error, then 5 to 10, with a save after each
    fifth; nothing but the log and its times of writing."""
    history = [
        ("submitted", 0), ("started", 30, 0), ("ended", 60, 0, 1), ("restarted", 60, 0),
        ("started", 65, 1), ("ended", 99, 1, 0),
    ]  # fmt: skip
    lines = []
    for kind, at, *more in history:
        event = {"time": NOW + at, "kind": kind}
        lines.append({**event, **dict(zip(("attempt", "code"), more, strict=False))})
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = {"groups": [{"name": "a", "count": 1, "ranks": 2}]}
    (folder / "plan.json").write_text(json.dumps(plan))
    for attempt, steps, begin in ((0, range(1, 7), 50.0), (1, range(5, 11), 80.0)):
        own = folder / f"attempt-{attempt}"
        own.mkdir(parents=True)
        text, marks, now = "", [], begin
        for step in steps:
            now += 0.5
            marks.append((now, len(text)))
            text += LINE.format(step)
            if step % 5 == 0:
                marks.append((now, len(text)))
                text += f"saving checkpoint at iteration {step:7d} to ckpt\n"
                now += 2
                marks.append((now, len(text)))
                text += f"  successfully saved checkpoint from iteration {step:7d} to ckpt\n"
        (own / "n0.out").write_text(text)
        times = "".join(f"{NOW + at:.3f} {place} 0\n" for at, place in marks)
        (own / "n0.times").write_text(times)


def test_a_script_without_traces_is_accounted_for_by_its_lines(tmp_path: Path) -> None:
    write_run(tmp_path)
    analysis = analyse(load_job(tmp_path))
    found = analysis.accounting
    assert not found.is_split
    assert found.rows["span_s"].sum() == pytest.approx(2 * 99)
    assert value_of(analysis.headline.start) == pytest.approx(35 / 69), "as the goodput: no queue"
    by_attempt = found.rows[found.rows["rank"] == 0].set_index("attempt")
    first, second = by_attempt.loc["0"], by_attempt.loc["1"]
    assert (first["queue_s"], first["start_s"]) == (30, 20)
    assert first["steps_s"] == pytest.approx(2)  # 1 to 4
    assert first["checkpoint_s"] == pytest.approx(2)
    assert first["lost_s"] == pytest.approx(1 + 5)  # steps 5 and 6, and until the end
    assert second["lost_s"] == pytest.approx(5)  # between the attempts
    assert second["start_s"] == pytest.approx(15)
    assert second["steps_s"] == pytest.approx(3)
    assert second["checkpoint_s"] == pytest.approx(4)
    assert found.overlap == 0
    assert sum(found.shares.values()) == pytest.approx(1)


def test_steps_done_again_are_counted_where_lines_are_of_several(tmp_path: Path) -> None:
    """Lines of five steps each: 25 to 30 and 26 to 30 are the same steps but one."""
    write_run(tmp_path)
    for attempt, steps in ((0, (10, 15, 20, 25, 30)), (1, (31, 36, 41))):
        own = tmp_path / f"attempt-{attempt}"
        (own / "n0.out").write_text("".join(LINE.format(step) for step in steps))
        (own / "n0.times").unlink()
    analysis = analyse(load_job(tmp_path))
    first, second = analysis.goodput.attempts
    assert (first.steps_s, first.repeated_s) == (pytest.approx(25 * 0.5), pytest.approx(4 * 0.5))
    assert (second.steps_s, second.repeated_s) == (pytest.approx(15 * 0.5), 0)
    rows = analysis.accounting.rows.set_index(["attempt", "rank"])
    assert rows.loc[("0", 0), "steps_s"] == pytest.approx(21 * 0.5)


def test_steps_that_take_longer_than_the_attempt_are_an_overlap(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "attempt-1" / "n0.out"
    path.write_text(path.read_text().replace("500.0", "9000.0"))
    assert analyse(load_job(tmp_path)).accounting.overlap > 0.1


def test_a_run_that_goes_on_is_accounted_for_until_its_last_line(tmp_path: Path) -> None:
    write_run(tmp_path)
    events = tmp_path / "events.jsonl"
    events.write_text("".join(line + "\n" for line in events.read_text().splitlines()[:-1]))
    found = analyse(load_job(tmp_path)).accounting
    second = found.rows[found.rows["attempt"] == "1"].iloc[0]
    assert second["span_s"] == pytest.approx(5 + 15 + 3 + 4)
    assert second["steps_s"] == pytest.approx(3)
    assert found.overlap == 0
    assert sum(found.shares.values()) == pytest.approx(1)


def test_an_evaluation_after_the_last_step_is_after_it(tmp_path: Path) -> None:
    """Lines about steps have times but those of evaluations, which say how many steps are done."""
    write_run(tmp_path)
    text, marks, now = "", [], 80.0
    for step in range(5, 11):
        if step == 8:
            marks.append((now + 2, len(text)))
            text += "step 8: train loss 1.2, val loss 1.1\n"
            now += 2
        now += 0.5
        marks.append((now, len(text)))
        text += f"iter {step}: loss 1.0, time {2500 if step == 8 else 500}.00ms\n"
    marks.append((now + 3, len(text)))
    text += "step 11: train loss 1.2, val loss 1.1\n"
    own = tmp_path / "attempt-1"
    (own / "n0.out").write_text(text)
    (own / "n0.times").write_text("".join(f"{NOW + at:.3f} {place} 0\n" for at, place in marks))
    found = analyse(load_job(tmp_path)).accounting
    row = found.rows[found.rows["rank"] == 0].set_index("attempt").loc["1"]
    assert row["start_s"] == pytest.approx(15)
    assert row["end_s"] == pytest.approx(99 - 85)
    assert row["steps_s"] + row["lost_s"] == pytest.approx(5 + 5)  # steps 5 and 6 are done again
    assert (row["unknown_s"], found.overlap) == (pytest.approx(0), 0)


@pytest.mark.parametrize(
    ("is_split", "why"), [(True, "traces or clocks"), (False, "steps are known from log lines")]
)
def test_time_that_is_counted_twice_names_what_can_be_the_cause(is_split: bool, why: str) -> None:
    rows = pd.DataFrame([{"attempt": "0", "rank": 0, "span_s": 10.0, "overlap_s": 0.5}])
    found = Accounting(rows=rows, attempts=(), is_split=is_split)
    said = explain_time(found, is_partial=False)
    assert f"is counted twice: {why}" in said

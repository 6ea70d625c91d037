"""Bounds of the time of an attempt by its lines about steps: proved, and not excluded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tests.jobs.monitor.readers.test_times_of_writing import NodeLogs
from varuna_core.facts.hang import Hang, HangWitness
from varuna_core.facts.known import Bounded, NotKnown, Value, Within, value_of
from varuna_core.records.logs.step_counts import Tally
from varuna_core.records.runfolder import AttemptFolder
from vjob.jobs.monitor.readers.attempt import AttemptReader
from vjob.reports.analysis.accounting import format_least
from vjob.reports.analysis.findings import find_all
from vjob.reports.analysis.headline import format_bounded, list_facts
from vjob.reports.analysis.measures import Analysis, analyse
from vjob.reports.analysis.opening import write_opening
from vjob.reports.analysis.readings import bound_share
from vjob.reports.analysis.step_times import build_step_times
from vjob.reports.load.tables import RunState, load_job
from vjob.reports.page.sections import build_sections

BEGAN, ENDED = 1_700_000_000.0, 1_700_000_100.0
Lines = Sequence[tuple[float, str]]


def write_run(folder: Path, lines: Lines, *, code: int = 0, ended: float = ENDED) -> None:
    """A run of one rank: 10 s until it began, then 90 s."""
    events = [
        {"kind": "submitted", "time": BEGAN},
        {"kind": "started", "time": BEGAN, "attempt": 0},
        {"kind": "ended", "time": ended, "attempt": 0, "code": code},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    plan = {"program": "script", "scheduler": "local", "groups": [{"count": 1, "ranks": 1}]}
    (folder / "plan.json").write_text(json.dumps(plan))
    own = folder / "attempt-0"
    (own / "exit").mkdir(parents=True)
    rank = {"rank": 0, "node": "n000", "signal": None, "stopped": False, "last_error": ""}
    rank |= {"started": BEGAN + 10, "ended": ended, "code": code}
    (own / "exit/0.json").write_text(json.dumps(rank))
    logs = NodeLogs(own)
    for at, line in lines:
        logs.write(BEGAN + at, f"0: {line}")


def read(folder: Path, lines: Lines) -> Analysis:
    write_run(folder, lines)
    return analyse(load_job(folder))


def count(first: int, last: int, every: int, begin: float, total: int | str = "") -> Lines:
    """Lines of every so manyeth step; a step takes a second, and the first one began at `begin`."""
    of = f"/{total}" if total else ""
    return [
        (begin + step, f"step {step}{of} loss {4 / step:.3f}")
        for step in range(first, last + 1, every)
    ]


RICH = [(95.0, "Epoch 0/0 ━━━━━━━━ 80/80 0:01:20 •        1.00it/s v_num: 0.000")]
EVALUATED = [*count(1, 30, 1, 15, 60), *((at + 25, line) for at, line in count(31, 60, 1, 15, 60))]
CASES: list[tuple[str, Lines, tuple[float, float] | str, tuple[float, float] | None]] = [
    # What the program prints, its goodput or why that is not known, and the share of its start.
    ("every step", count(1, 80, 1, 15, 80), (0.80, 0.80), (0.15, 0.15)),
    ("every tenth step", count(10, 80, 10, 15, 80), (0.70, 0.85), (0.10, 0.25)),
    ("every tenth step, without a total", count(10, 80, 10, 10), (0.70, 0.89), (0.10, 0.20)),
    ("from step 0 on", [(15.0, "iter 0: loss 9.0"), *count(5, 80, 5, 15)],
     (0.80, 0.84), (0.15, 0.15)),
    ("resumed at step 1000", count(1001, 1070, 1, -985, 1070), (0.70, 0.70), (0.15, 0.15)),
    ("a pause that no line explains", EVALUATED, (0.60, 0.85), (0.15, 0.15)),
    ("once, at the end", RICH, "the first step that was read is 80", None),
    ("twice", count(40, 80, 40, 15, 80), (0.40, 0.85), None),
    ("no step", [(50.0, "still at it")], "no time of a step was read", None),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "goodput", "start"), [row[1:] for row in CASES],
                         ids=[row[0] for row in CASES])  # fmt: skip
def test_goodput_is_what_the_lines_prove(
    lines: Lines, goodput: tuple[float, float] | str, start: tuple[float, float] | None,
    tmp_path: Path,
) -> None:  # fmt: skip
    analysis = read(tmp_path, lines)
    head = analysis.headline
    if isinstance(goodput, str):
        assert isinstance(head.goodput, NotKnown) and goodput in head.goodput.reason
    else:
        assert list_bounds(head.goodput) == pytest.approx(goodput, abs=0.02)
        assert isinstance(head.goodput, Value) == (goodput[0] == goodput[1])
        assert analysis.accounting.bounds["steps"][0] <= list_bounds(head.goodput)[0] + 0.02
    if start is not None:
        assert list_bounds(head.start) == pytest.approx(start, abs=0.02)
    assert sum(analysis.accounting.shares.values()) == pytest.approx(1.0, abs=0.02)


def list_bounds(found: Bounded[float]) -> tuple[float, float]:
    assert not isinstance(found, NotKnown), found
    return (found.low, found.high) if isinstance(found, Within) else (found.value, found.value)


def test_the_same_steps_in_two_logs_count_once() -> None:
    """Goodput 38 % where 22 % was true: each node's log had times of other steps."""
    columns = ["attempt", "node", "step", "time_ms", "timed"]
    rows = [("0", "a", 1, None, None), ("0", "a", 35, 60.0, 34), ("0", "b", 40, 60.0, 39)]
    times = build_step_times(pd.DataFrame(), pd.DataFrame(rows, columns=columns))
    assert times[["step", "count"]].to_numpy().tolist() == [[40, 39]]


def test_a_single_line_is_no_pace_and_no_advice(tmp_path: Path) -> None:
    """Goodput 0.05 %, start 86 %: "fewer imports", said of a run that trained all the time."""
    analysis = read(tmp_path, RICH)
    facts = {fact.name: fact for fact in list_facts(analysis.headline)}
    assert facts["pace"].value == "not known: 1 of 80 steps have a time"
    assert not facts["pace"].is_known and not facts["goodput"].is_known
    assert [one.rule for one in find_all(load_job(tmp_path), analysis)] == ["no trace"]
    low, high = analysis.accounting.bounds["start"]
    assert low == pytest.approx(0.10, abs=0.01) and high > 0.9


def test_a_run_that_ended_before_any_step_was_seen_is_not_asked_for_its_lines(
    tmp_path: Path,
) -> None:
    """The first advice after a crash in an import was `progress`."""
    write_run(tmp_path, [(50.0, "still at it")], code=1)
    found = find_all(load_job(tmp_path), analyse(load_job(tmp_path)))
    assert [(one.rule, one.key) for one in found[:2]] == [
        ("ended badly", ""),
        ("steps not known", ""),
    ]
    assert "no step was seen before the end" in found[1].sentence


@pytest.mark.parametrize(
    ("low_s", "may_s", "slack_s", "said"),
    [
        (50, 0, 0, "50 %"), (50, 2, 0, "50 %"), (50, 10, 0, "50 % to 60 %"),
        (50, 0, 5, "45 % to 50 %"), (2, 98, 0, None), (98, 50, 0, "98 %"),
    ],
)  # fmt: skip
def test_bounds_that_are_far_apart_tell_nothing(
    low_s: float, may_s: float, slack_s: float, said: str | None
) -> None:
    found = bound_share(low_s, may_s, 100.0, (), "", slack_s)
    assert isinstance(found, NotKnown) if said is None else format_bounded(found) == said


def write_counts(folder: Path, steps: int, begin: float, pause_s: float = 10) -> None:
    """The counter of rank 0: a step a second from `begin` on, and a pause in the middle."""
    tally = Tally(0.0, BEGAN + 12)
    for number in range(1, steps + 1):
        tally.add(begin - 12 + number + (pause_s if number > steps / 2 else 0))
        tally.note()
    path = folder / "ranks/0.steps"
    path.parent.mkdir()
    data = tally.pack_body()
    path.write_bytes(tally.pack_head((1, 1, 1, 1, 0), tally.count) + data)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_run_that_goes_on_is_measured_so_far(hangs: bool, tmp_path: Path) -> None:
    """One that had hung for 2 min "goes on after 27 s, 40 s left"; one that trained had no
    goodput."""
    write_run(tmp_path, count(1, 45, 1, 15, 80))
    events = (tmp_path / "events.jsonl").read_text().splitlines()[:2]
    (tmp_path / "events.jsonl").write_text("\n".join(events))
    (tmp_path / "attempt-0/exit/0.json").unlink()
    write_counts(tmp_path / "attempt-0", 45, 15, pause_s=0)
    hang = Hang(HangWitness.SILENT, since=BEGAN + 60, seen_at=BEGAN + 150)
    state = RunState("RUNNING", "", BEGAN + 180)
    job = replace(load_job(tmp_path), state=state, hangs={"0": hang} if hangs else {})
    found = analyse(job)
    assert value_of(found.headline.duration_s) == 180
    assert list_bounds(found.headline.goodput) == pytest.approx([45 / (180 if hangs else 60)] * 2)
    assert value_of(found.headline.left_s) == (None if hangs else pytest.approx(35, abs=0.1))
    assert found.accounting.seconds.get("hung", 0) == (120 if hangs else 0)


@pytest.mark.parametrize("lines", [RICH, [], count(10, 60, 10, 15)])
def test_counted_steps_tell_the_goodput_whatever_the_lines_do(lines: Lines, tmp_path: Path) -> None:
    write_run(tmp_path, lines)
    write_counts(tmp_path / "attempt-0", 70, 15)
    head = analyse(load_job(tmp_path)).headline
    assert list_bounds(head.goodput) == pytest.approx((0.70, 0.80), abs=0.02)  # the pause, or not
    assert list_bounds(head.start) == pytest.approx((0.15, 0.15), abs=0.02)
    assert isinstance(head.step_s, Value) and head.step_s.value == pytest.approx(1.0, abs=0.01)
    facts = {fact.name: fact.value for fact in list_facts(head)}
    assert lines or facts["steps"] == "70 counted, 1 s each (about the median of 69 counted steps)"


def test_a_slow_step_whose_time_the_program_prints_is_no_pause(tmp_path: Path) -> None:
    """Goodput 32 % to 77 %: steps that took long, by their own lines, were nobody's time."""
    lines = [
        (15.0 + n + 10 * (n > 35), f"iter {n}: loss 2.0, time {11000 if n == 36 else 1000}.00ms")
        for n in range(1, 71)
    ]
    write_run(tmp_path, lines)
    write_counts(tmp_path / "attempt-0", 70, 15)
    goodput = analyse(load_job(tmp_path)).headline.goodput
    assert isinstance(goodput, Value) and goodput.value == pytest.approx(0.80, abs=0.01)


def test_a_group_on_one_node_is_its_ranks(tmp_path: Path) -> None:
    """`group master: 1 x 1 ranks` was said of a plain run on one machine."""
    write_run(tmp_path, RICH)
    group = {"name": "master", "count": 1, "ranks": 2, "gpu_type": "a100"}
    (tmp_path / "plan.json").write_text(json.dumps({"groups": [group]}))
    job = load_job(tmp_path)
    assert ("ranks", "2, a100") in build_sections(job, analyse(job))[0].rows


def test_steps_without_any_value_are_no_table_of_the_training(tmp_path: Path) -> None:
    bar = "100%|##########| 60/60 [00:03<00:00, 15.17it/s]"
    write_run(tmp_path, [(24.0, bar)])
    job = load_job(tmp_path)
    assert "training" not in [one.title for one in build_sections(job, analyse(job))]


JUDGED: list[tuple[str, Lines, int, tuple[int | None, int | None, bool]]] = [
    # Lines, counted steps, and what status and report say: step, total, counted only.
    ("lines are behind", count(10, 60, 10, 15, 80), 66, (66, 80, False)),
    ("a resumed program", count(1010, 1060, 10, -985, 1080), 66, (1060, 1080, False)),
    ("no lines", [], 70, (70, None, True)),
    ("parts of a step", [(15.0 + at / 4, f"step {at}/320 loss 1.0") for at in range(8, 241, 8)],
     60, (60, 80, True)),
    ("lines alone", count(10, 60, 10, 15, 80), 0, (60, 80, False)),
    ("a bar of micro-batches, drawn once",
     [(95.0, "train: 100%|##| 320/320 [01:20<00:00,  4.00it/s]")], 80, (80, None, True)),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "steps", "said"), [row[1:] for row in JUDGED],
                         ids=[row[0] for row in JUDGED])  # fmt: skip
def test_the_report_has_the_step_of_status(
    lines: Lines, steps: int, said: tuple[int | None, int | None, bool], tmp_path: Path
) -> None:
    """Status was at step 66 by the optimizers; the report ended at 60, the last line."""
    write_run(tmp_path, lines)
    own = tmp_path / "attempt-0"
    if steps:
        write_counts(own, steps, 15, pause_s=0)
    head = analyse(load_job(tmp_path)).headline
    assert (value_of(head.last_step), value_of(head.num_steps), head.is_counted) == said
    progress = AttemptReader(AttemptFolder(own, 0), None, 0).read().progress
    assert progress is not None
    assert (progress.step, progress.num_steps, progress.is_counted) == said


EVALUATIONS: list[tuple[str, list[str], list[str]]] = [
    # Lines for each {0}, a step, {1}, a loss; and what the findings say of losses.
    ("nanoGPT", ["iter {0}: loss {1:.4f}, time 130.22ms, mfu 5.00%",
                 "step {0}: train loss {1:.4f}, val loss 9{1:.4f}"],
     ["The loss was 3 at first and 1 at last, at best 1.",
      "The val loss was 93 at first and 91 at last, at best 91 after step 30."]),
    ("JSON", ['{{"step": {0}, "loss": {1}}}', '{{"step": {0}, "eval_loss": 9, "eval_acc": {1}}}'],
     ["The loss was 3 at first and 1 at last, at best 1.",
      "The eval loss was 9 at first and 9 at last, at best 9 after step 10."]),
    ("beside", ["Epoch {0} step {0} loss {1} test_accuracy {1}", "valid_loss: {1}5"],
     ["The loss was 3 at first and 1 at last, at best 1.", 
      "The test accuracy was 3 at first and 1 at last.",
      "The val loss was 3.05 at first and 1.05 at last, at best 1.05 after the line of step 30."]),
    ("closing", ["step {0} loss {1}", "val loss {1}5", "Finished. best val loss = 9"],
     ["The loss was 3 at first and 1 at last, at best 1.",
      "The val loss was 3.05 at first and 1.05 at last, at best 1.05 after the line of step 30."]),
    ("NaN", ["step {0} loss {1}", "step {0} val_loss 4.5", "step 1{0} val_loss nan"],
     ["The loss was 3 at first and 1 at last, at best 1.",
      "The val loss, where it was a number, was 4.5 at first and 4.5 at last, "
      "at best 4.5 after step 10."]),
    ("only NaN", ["step {0} loss {1}", "step {0} val_loss nan"],
     ["The loss was 3 at first and 1 at last, at best 1.",
      "The val loss was not a number in any line."]),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "said"), [row[1:] for row in EVALUATIONS],
                         ids=[row[0] for row in EVALUATIONS])  # fmt: skip
def test_losses_of_evaluations_have_their_own_names(
    lines: list[str], said: list[str], tmp_path: Path
) -> None:
    steps = [(10, 3.0), (20, 2.0), (30, 1.0)]
    texts = [(20.0 + n, line.format(n, loss)) for n, loss in steps for line in lines]
    write_run(tmp_path, texts)
    job = load_job(tmp_path)
    found = find_all(job, analyse(job))
    assert sorted(one.sentence for one in found if one.rule in ("loss", "evaluation")) == sorted(
        said
    )


def test_counted_steps_of_an_attempt_before_are_in_doubt_without_their_numbers(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, [])
    write_counts(tmp_path / "attempt-0", 70, 15)
    later = tmp_path / "attempt-1"
    (later / "exit").mkdir(parents=True)
    rank = json.loads((tmp_path / "attempt-0/exit/0.json").read_text())
    rank |= {"started": ENDED + 1, "ended": ENDED + 90}
    (later / "exit/0.json").write_text(json.dumps(rank))
    write_counts(later, 70, 106)
    goodput = analyse(load_job(tmp_path)).headline.goodput
    assert isinstance(goodput, NotKnown | Within)
    if isinstance(goodput, Within):
        assert goodput.low < 0.45 < goodput.high


RULES = {
    "saves", "start", "silence", "swap", "gpu idle", "unused memory", "goodput", "prediction",
}  # fmt: skip
"""Findings whose figures come from lines, of a run without traces."""
SAVES = [
    (at, text)
    for step in (20, 40, 60)
    for at, text in (
        (90.0 + step, f"saving checkpoint at iteration {step} to /ckpt"),
        (99.0 + step, f"successfully saved checkpoint from iteration {step} to /ckpt"),
    )
]


def write_wasteful(folder: Path, lines: Lines) -> None:
    """A run of 90 s until its first step, with long saves, idle GPUs and a growing swap, that hung
    for 3 min and failed."""
    write_run(folder, sorted([*lines, *SAVES]), code=1, ended=BEGAN + 400)
    plan = {"program": "script", "scheduler": "slurm", "groups": [{"count": 1, "ranks": 1}]}
    plan["prediction"] = {"step_s": 0.5}
    (folder / "plan.json").write_text(json.dumps(plan))
    samples = [
        {"time": BEGAN + at, "cpu_percent": 5.0, "swap_used_mb": 0.0 if at < 150 else 9000.0,
         "gpus": [{"index": 0, "name": "A10", "utilization": 4.0, "memory_used_mb": 900.0,
                   "memory_total_mb": 24000.0, "temperature": 40.0, "throttle": ""}]}
        for at in range(10, 400, 10)
    ]  # fmt: skip
    rows = "".join(json.dumps(one) + "\n" for one in samples)
    (folder / "attempt-0/n0.gpu.jsonl").write_text(rows)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (count(1, 70, 1, 100, 1000), RULES),
        ([(195.0, RICH[0][1])], {"goodput"}),  # at most 47 %
        (count(40, 80, 40, 100, 1000), set()),
        ([(195.0, "step 70/1000 loss 1.0")], set()),
        ([], set()),
    ],
)
def test_each_finding_is_silent_where_its_figures_are_not_known(
    lines: Lines, said: set[str], tmp_path: Path
) -> None:
    write_wasteful(tmp_path, lines)
    job = load_job(tmp_path)
    assert {one.rule for one in find_all(job, analyse(job))} & RULES == said


def test_times_of_writing_that_are_not_exact_are_no_proof_of_steps(tmp_path: Path) -> None:
    """Steps 23 % or more in the table, of a run whose goodput was 0.27 % to 30 %."""
    write_run(tmp_path, count(1, 80, 1, 15, 80))
    found = load_job(tmp_path)
    found.logs["spans"]["slack_s"] = 30.0
    analysis = analyse(found)
    low, high = list_bounds(analysis.headline.goodput)
    assert low == pytest.approx(0.50, abs=0.02) and high == pytest.approx(0.80, abs=0.02)
    assert format_least(analysis.accounting, "steps") == "50 % to 80 %"


def test_the_best_line_that_is_named_once_more_is_not_the_last(tmp_path: Path) -> None:
    """The loss of LightGBM's best round, printed again after the last, was told as the last; and a
    run whose lines are written at once had "step 70; its steps are not known"."""
    lines = [
        f"[{step}]\ttraining's binary_logloss: {0.5 - step / 1000}\tvalid_1's binary_logloss: {val}"
        for step, val in zip(
            range(10, 80, 10), (0.55, 0.54, 0.53, 0.52, 0.51, 0.50, 0.52), strict=True
        )
    ]
    lines += ["Early stopping, best iteration is:", lines[5]]
    write_run(tmp_path, [(20.0, line) for line in lines])
    job = load_job(tmp_path)
    analysis = analyse(job)
    found = find_all(job, analysis)
    [said] = (one for one in found if one.rule == "evaluation")
    assert "from 0.55 to 0.52" in said.sentence.replace("was 0.55 at first and", "from 0.55 to")
    assert said.evidence == "7 lines of the log"
    went = write_opening(job, analysis, found)
    assert "at step 70" in went and "; how long a step took is not known" in went

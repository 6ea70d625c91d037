"""What people read, and what scripts read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from varuna_core.facts.finding import Finding
from varuna_core.facts.known import NotKnown, Value
from varuna_core.records.exits import Outcome, RankExit
from varuna_core.records.formatting import format_duration
from varuna_core.records.logs.step_counts import Tally, parse_counts
from vjob.jobs.monitor.model.snapshot import (
    Attempt,
    Echo,
    Health,
    JobRow,
    Line,
    Node,
    Phase,
    Point,
    Progress,
    Rank,
    Scheduler,
    Snapshot,
    Verdict,
    name_step,
)
from vjob.jobs.monitor.model.text import choose_nodes, render, render_json
from vjob.jobs.monitor.readers.node_files import join_counts

EXIT = RankExit(5, "n1", 9, None, False, 1.0, 2.0, "ValueError: x")
LINE = Line(text="ValueError: x", node="n1", rank=5, file="n1.err", kind="error", num_same=64)


MORPHS = ("from 8 x 4 to 7 x 4, 9 s", "from 7 x 4 to 6 x 4, 12 s")


def make(**more: object) -> Snapshot:
    base = Snapshot(
        now=1000.0,
        run="demo-1",
        folder="/log/demo-1",
        state="RUNNING",
        scheduler=Scheduler(
            name="slurm",
            jobs=(JobRow(id="77", state="RUNNING", word="RUNNING", nodes="n[0-1]"),),
        ),
        attempt=1,
        world=8,
        earlier=(Attempt(number=0, reason="n3 was lost", step=40),),
        nodes=(
            Node(name="n0", ranks=(0, 1, 2, 3), phase="running", beat_at=997.0, out=("a", "b")),
            Node(name="n1", ranks=(4, 5, 6, 7), err=("ValueError: x",), num_lines={"err": 1548}),
        ),
        ranks=(Rank(rank=5, node="n1", exit=EXIT),),
        progress=Progress(
            step=50,
            num_steps=90,
            at=940.0,
            points=(Point(step=40, step_s=1.5), Point(step=50, step_s=1.4238, loss=8.9176)),
        ),
        errors=(LINE,),
        echoes=(Echo(name="WORLD_SIZE", said="16", wanted="8", line=replace(LINE, node="n0")),),
    )
    return replace(base, **more)  # type: ignore[arg-type]


def test_a_snapshot_reads_from_the_whole_to_the_parts() -> None:
    assert render(make(), None, all_nodes=False) == (
        """\
demo-1  RUNNING
  job 77  RUNNING  n[0-1]
  attempt 1, 8 ranks: 1 failed
  attempt 0 ended at step 40: n3 was lost
  step 50 of 90, 1.42 s a step in one reading, loss 8.9176, 60 s ago
  files /log/demo-1
errors, oldest first
  n1 rank 5 | ValueError: x  (x64)
n0  (ranks 0-3, running, alive 3 s ago)
  out  a
  out  b
n1  (ranks 4-7, 1 failed, err 1,548 lines)
  err  ValueError: x
settings as the run printed them
  WORLD_SIZE: 16   <- 8 was asked for (n0)
step times
  step 40 : 1.5000 s
  step 50 : 1.4238 s"""
    )


def test_the_counter_has_one_mean_for_the_steps_of_a_second() -> None:
    """Each of a second's steps had its mean, so that the last second had half of the votes."""
    tally, points, seconds = Tally(0.0, 900.0), [], 0.0
    for step in range(1, 25):
        seconds += 0.75 if 17 <= step <= 21 else 0.25 if step < 12 else 0.5
        tally.add(seconds)
        points.append(Point(step=step, loss=1.5, at=900.0 + seconds))
        if step in (1, 6, 11, 16, 21, 24):
            tally.note()
    counts = parse_counts(tally.pack_head((1, 1, 1, 1, 0), 24) + tally.pack_body())
    assert counts is not None
    by_lines = Progress(step=24, points=tuple(points))
    text = render(
        make(progress=join_counts(by_lines, {0: counts}, 0, 0.0, None)), None, all_nodes=False
    )
    assert "0.5 s a step (the median of the last 5 means over 1 s or more of steps)" in text
    assert text.endswith(
        """
step times, means over 1 s or more of steps
  steps 2 to 6 : 0.2500 s
  steps 7 to 11 : 0.2500 s
  steps 12 to 16 : 0.5000 s
  steps 17 to 21 : 0.7500 s
  steps 22 to 24 : 0.5000 s"""
    )


def test_a_job_that_is_over_is_not_at_a_checkpoint_now() -> None:
    phase = Phase(name="checkpoint", since=900.0, line=LINE)
    for state, has in (("submitted", True), ("ended", False)):
        text = render(make(record_state=state, phase=phase), None, all_nodes=False)
        assert ("now at a checkpoint" in text) is has


def test_what_follows_from_the_end_of_a_rank_is_folded_below_its_error() -> None:
    """Those whose peer had gone wrote before it, and were shown first."""
    closed = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [n1]:4"
    fallout = replace(LINE, text=closed, kind="connection lost", rank=2, num_same=7)
    summary = replace(LINE, text="exitcode  : -15 (pid: 7)", kind="launcher summary", num_same=1)
    text = render(make(errors=(fallout, summary, LINE)), None, all_nodes=False)
    assert (
        f"""
errors, oldest first
  n1 rank 5 | ValueError: x  (x64)
  8 lines from launchers or about the loss of another rank, such as
    n1 rank 2 | {closed}
"""
        in text
    )


def test_a_verdict_stands_above_with_its_evidence_and_what_to_do() -> None:
    verdict = Verdict(
        health=Health.FAILING,
        reason="rank 5 on n1 failed",
        main=Finding("root-error"),
        evidence=(LINE,),
        facts=("3 others wait",),
        advice="vjob logs 77 --errors",
        remarks=("disk 97 % full",),
    )
    lines = render(make(), verdict, all_nodes=False).splitlines()
    assert lines[:6] == [
        "demo-1  RUNNING  FAILING",
        "  rank 5 on n1 failed",
        "    n1 rank 5 | ValueError: x",
        "    3 others wait",
        "  next: vjob logs 77 --errors",
        "  note: disk 97 % full",
    ]
    found = json.loads(render_json(make(), verdict))
    assert (found["format"], found["verdict"]["health"]) == (3, "FAILING")
    assert found["verdict"]["exit_code"] == 15


def test_evidence_that_the_reason_has_already_is_shown_once() -> None:
    reason = "rank 5 on n1 exited 1: ValueError: x"
    ends = replace(LINE, text=f"stopping the attempt: {reason}", node="", file="scheduler.out")
    known = Verdict(
        health=Health.DEAD,
        reason=reason,
        main=Finding("x"),
        evidence=(LINE, ends, replace(LINE, text="y")),
    )
    lines = render(make(), known, all_nodes=False).splitlines()
    assert lines[1:3] == [f"  {reason}", "    n1 rank 5 | y"]


def test_a_run_that_somebody_cancelled_shows_no_errors_of_the_batch_script() -> None:
    said = replace(LINE, text="stopping the attempt: SIGTERM", node="", rank=None)
    outcome = Outcome(143, "SIGTERM from outside", None, None, None, [], 1.0)
    ended = make(errors=(said,), outcome=outcome, scheduler_lines=("code 143",))
    cancelled = Verdict(health=Health.CANCELLED, main=Finding("x"))
    shown = render(ended, cancelled, all_nodes=False)
    assert "errors" not in shown and "batch script" not in shown
    failed = render(ended, replace(cancelled, health=Health.DEAD), all_nodes=False)
    assert "stopping the attempt" in failed and "batch script" in failed


def test_a_silent_scheduler_is_told_with_the_age_of_its_word() -> None:
    jobs = (JobRow(id="77", state="UNKNOWN", word="TELEPORTING"),)
    silent = Scheduler(name="slurm", jobs=jobs, age_s=300.0, problem="squeue hangs")
    said = render(make(scheduler=silent), None, all_nodes=False)
    assert "  no answer: squeue hangs; what follows is 5 min old\n  job 77  TELEPORTING\n" in said


def test_a_count_of_this_attempt_says_so() -> None:
    """A script that went on from step 250 was at 65 optimizer steps."""
    assert name_step(65, is_counted=True) == "65 optimizer steps of this attempt"
    assert name_step(201, 200) == "step 201", "it was said to be one of 200"
    assert name_step(1, 2, is_counted=True) == "1 of 2 optimizer steps"


def test_of_many_nodes_those_that_matter_are_shown() -> None:
    nodes = tuple(Node(name=f"n{at}") for at in range(1000))
    outcome = Outcome(9, "n500 was lost", None, "n500", None, [], 1.0)
    found = make(nodes=nodes, outcome=outcome, ranks=(Rank(rank=5, node="n7", exit=EXIT),))
    assert [node.name for node in choose_nodes(found, None)] == ["n0", "n1", "n7", "n500", "n999"]
    said = render(found, None, all_nodes=False)
    assert "and 995 more nodes; --all shows them" in said
    assert "n998" in render(found, None, all_nodes=True)


def test_numbers_that_json_lacks_are_texts() -> None:
    points = (Point(step=1, loss=math.nan), Point(step=2, loss=-math.inf))
    found = json.loads(render_json(make(progress=Progress(step=2, points=points)), None))
    assert [point["loss"] for point in found["progress"]["points"]] == ["nan", "-inf"]


def test_what_is_not_known_is_printed_with_its_reason() -> None:
    values: dict[str, Any] = {"one": NotKnown("no line has it"), "two": Value(2.0)}
    found = json.loads(render_json(make(stop=values), None))
    assert found["stop"] == {
        "one": {"not_known": "no line has it", "evidence": []},
        "two": {"value": 2.0, "evidence": []},
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (3.42, "3.4 s"),
        (3, "3 s"),
        (119, "119 s"),
        (300, "5 min"),
        (9000, "2 h 30 min"),
        (math.inf, "ever"),
        (864000, "10 d"),
    ],
)
def test_ages_are_told_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_nothing_at_all_is_no_trouble() -> None:
    empty = Snapshot(now=0.0, run="/logs", folder="/logs", scheduler=Scheduler(name=""))
    assert render(empty, None, all_nodes=False) == "/logs\n  files /logs"


@pytest.mark.parametrize(
    ("morphs", "said"),
    [
        (MORPHS[:1], "  morphed from 8 x 4 to 7 x 4, 9 s\n"),
        (MORPHS, "  morphed 2 times, last from 7 x 4 to 6 x 4, 12 s\n"),
    ],
)
def test_a_morph_that_is_over_is_told_with_what_it_cost(morphs: tuple[str, ...], said: str) -> None:
    assert said in render(make(morphs=morphs), None, all_nodes=False)
    assert "morphed" not in render(make(), None, all_nodes=False)


def test_an_element_of_an_array_that_has_ended_is_not_alive() -> None:
    rows = (JobRow(id="61_0", state="RUNNING"), JobRow(id="61_1", state="FAILED"))
    nodes = (Node(name="61_0", log_at=998.0), Node(name="61_1", log_at=993.0))
    scheduler = Scheduler(name="slurm", jobs=rows)
    text = render(make(nodes=nodes, scheduler=scheduler), None, all_nodes=True)
    assert "61_0  (alive" in text and "61_1  (last seen" in text

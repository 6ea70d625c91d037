"""Verdicts on jobs that are over, and on folders of logs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.jobs.monitor.builders import (
    NOW,
    OOM,
    STEP_S,
    change_node,
    change_rank,
    healthy,
    make_exit,
    make_line,
    make_outcome,
    make_points,
    over,
    silent,
    with_points,
    with_state,
)
from varuna_core.facts.cause import Actor, End, EndCause
from varuna_core.facts.hang import Hang, HangWitness
from varuna_core.records.exits import RankExit
from vjob.jobs.monitor.log_lines.errors import classify_line
from vjob.jobs.monitor.model.snapshot import Health, JobRow, Line, Scheduler, Snapshot
from vjob.jobs.monitor.readers.slurm_job import choose_state
from vjob.jobs.monitor.rules.judge import judge


def killed() -> Snapshot:
    why = "rank 6 on n001 was ended by SIGKILL"
    outcome = make_outcome(137, why, 6, "n001", culprit_signal="SIGKILL")
    noise = make_line("RuntimeError: Connection closed by peer", node="n000", rank=2)
    return over(healthy(), outcome=outcome, errors=(noise,))


def test_a_job_whose_ranks_exited_0_is_done() -> None:
    verdict = judge(over(healthy(), "COMPLETED", outcome=make_outcome(0, "all 16 ranks exited 0")))
    assert (verdict.health, verdict.exit_code) == (Health.DONE, 0)
    assert "vjob report 4711" in verdict.advice


def test_a_last_step_is_no_end_while_nodes_live_and_the_scheduler_is_away() -> None:
    """It saved its last checkpoint as the controller was restarted, and was called DONE."""
    away = replace(healthy().scheduler, jobs=(), problem="squeue: timed out")
    last = with_points(healthy(scheduler=away), make_points([STEP_S] * 30), num_steps=30)
    assert judge(last).health is Health.HEALTHY
    gone = replace(last, now=last.now + 3600)
    assert judge(gone).health is Health.DONE, "nobody beats any more"


def test_steps_that_could_not_be_printed_on_a_full_disk_may_have_been_done() -> None:
    ended = over(healthy(), "COMPLETED", outcome=make_outcome(0, "all ranks exited 0"))
    short = with_points(ended, make_points([STEP_S] * 22), num_steps=60)
    own = RankExit(0, "n000", 0, None, False, 1.0, 2.0, "", unwritten=3_000_000)
    lossy = replace(short, ranks=(replace(short.ranks[0], exit=own), *short.ranks[1:]))
    assert judge(lossy).facts == (
        "3,000,000 bytes of the logs could not be written, so later steps are not known",
    )


def test_a_job_that_exits_0_with_a_loss_that_is_no_number_did_not_end_well() -> None:
    """It trained for 196 steps with a loss of nan, and was DONE without a word of it."""
    ended = over(healthy(), "COMPLETED", outcome=make_outcome(0, "all ranks exited 0"))
    *before, last = make_points([STEP_S] * 60)
    for changed in (replace(last, loss=float("nan")), replace(last, loss=None, nan=1)):
        said = judge(with_points(ended, (*before, changed), num_steps=last.step, is_asked=True))
        assert said.health is Health.DONE and "ended well" not in said.reason
        assert "not a number" in said.facts[0]
        cancelled = over(healthy(), "CANCELLED", outcome=make_outcome(143, ""))
        said = judge(with_points(cancelled, (*before, changed), is_asked=True))
        assert said.health is Health.CANCELLED and "not a number" in said.facts[0]
    skipped = replace(last, loss=float("nan"), skipped=1)  # for overflow, as fp16 does now and then
    asked = judge(with_points(ended, (*before, skipped), num_steps=last.step, is_asked=True))
    assert asked.facts == ()


def test_a_number_that_is_only_a_least_one_may_stand_for_the_last_step() -> None:
    """A resumed script printed step 575 of 576, counted from 0, and had done all of them."""
    ended = over(healthy(), "COMPLETED", outcome=make_outcome(0, "all ranks exited 0"))
    points = make_points([STEP_S] * 29)[::5]
    for num_steps, is_short in ((points[-1].step + 5, False), (points[-1].step + 6, True)):
        read = with_points(ended, points, num_steps=num_steps, is_least=True)
        assert ("the run stopped before its last step" in judge(read).facts) is is_short


def test_a_script_that_counts_from_0_did_not_stop_before_its_last_step() -> None:
    ended = over(healthy(), "COMPLETED", outcome=make_outcome(0, "all ranks exited 0"))
    points = make_points([STEP_S] * 29)
    said = judge(with_points(ended, points, num_steps=30))
    assert (
        said.facts == ("the run stopped before its last step",) and "ended well" not in said.reason
    )
    asked = judge(with_points(ended, points, num_steps=30, is_asked=True))
    assert (asked.health, asked.facts) == (Health.DONE, ()), "the conf's number of steps"


def test_a_table_that_reads_no_logs_does_not_say_that_there_was_no_step() -> None:
    """A run's line in the table of all runs, and its own page."""
    ended = over(healthy(), "CANCELLED", outcome=None)
    ended = replace(ended, record_state="ended", record_verdict="CANCELLED", message="cancelled")
    own, line = judge(ended), judge(replace(ended, progress=None, attempt=None, nodes=(), ranks=()))
    assert "at step" in own.reason and own.reason.startswith(line.reason)
    assert line.reason == "cancelled" and line.health is own.health is Health.CANCELLED


@pytest.mark.parametrize(
    ("step", "words"), [(None, "submit again;"), (40, "checkpoint of step 40")]
)
def test_only_who_has_a_checkpoint_hears_that_it_goes_on(step: int | None, words: str) -> None:
    ended = replace(over(healthy(), "CANCELLED", outcome=None), checkpoint_step=step)
    assert words in judge(ended).advice and "train.checkpoint" not in judge(ended).advice


def test_a_rank_that_a_dying_node_killed_is_no_kill_by_somebody() -> None:
    """Its exit came to the files before the node was gone."""
    ended = replace(killed(), record_state="ended", record_verdict="NODE_FAIL")
    verdict = judge(ended)
    assert verdict.reason == "the scheduler reports that node n001 failed"
    assert verdict.node == "n001"
    assert "kill -9" in judge(killed()).reason


def test_what_srun_prints_as_it_ends_a_step_explains_nothing() -> None:
    """A split run that was preempted: Slurm calls its jobs FAILED."""
    line = make_line("slurmstepd: error: *** STEP 14.0 ON b1 CANCELLED AT 2024-05-01T12:00:00 ***")
    outcome = make_outcome(143, "SIGTERM from the scheduler (cancel, preemption), first on b1")
    verdict = judge(over(healthy(), outcome=outcome, errors=(line,)))
    assert verdict.reason == outcome.reason and line in verdict.evidence


@pytest.mark.parametrize(
    ("more", "health", "said"),
    [
        (" ***", Health.CANCELLED, "cancelled at step 200"),
        (" DUE TO TIME LIMIT ***", Health.DEAD, "time limit"),
    ],
)
def test_the_schedulers_line_says_why_before_its_state_does(
    more: str, health: Health, said: str
) -> None:
    """A cancelled run was RUNNING and DEAD for half a minute, with the exit code of a failure."""
    line = make_line(f"slurmstepd: error: *** JOB 14 ON b1 CANCELLED AT 2024-05-01T12:00:00{more}")
    stop = {"kind": "signal", "code": 143, "reason": "SIGTERM from outside"}
    ending = healthy(errors=(line,), stop=stop)
    assert judge(ending).health is Health.FAILING and line in judge(ending).evidence
    verdict = judge(replace(ending, outcome=make_outcome(143, "SIGTERM from outside")))
    assert verdict.health is health and said in f"{verdict.reason} {verdict.advice}"


def test_a_job_finished_yesterday_is_done_by_its_record() -> None:
    snapshot = healthy(
        scheduler=Scheduler(name="slurm"),
        record_state="ended",
        record_verdict="COMPLETED",
        outcome=make_outcome(0, "all 16 ranks exited 0"),
    )
    assert judge(silent(snapshot, 86400)).health is Health.DONE


def test_a_killed_rank_is_named_with_its_signal() -> None:
    verdict = judge(killed())
    assert (verdict.health, verdict.exit_code) == (Health.DEAD, 10)
    assert (verdict.node, verdict.rank) == ("n001", 6)
    assert "SIGKILL" in verdict.reason and "sender unknown" in verdict.reason
    assert verdict.evidence[0].kind == "connection lost"


def test_memory_is_the_cause_where_something_proves_it() -> None:
    proof = make_line("slurmstepd: error: Detected 2 oom_kill events in StepId=1.0.", node="n001")
    verdict = judge(replace(killed(), errors=(*killed().errors, proof)))
    assert "memory was used up" in verdict.reason
    assert verdict.evidence[0] == proof
    full = change_node(killed(), "n001", memory_used_mb=749_000)
    assert "749000 of 750000" in judge(full).reason
    assert "memory" in judge(with_state(killed(), "OUT_OF_MEMORY")).reason


def test_fallout_of_the_culprit_points_to_the_rank_that_began() -> None:
    lines = (
        make_line("RuntimeError: Connection closed by peer", node="n000", rank=2),
        OOM,
    )
    outcome = make_outcome(1, "rank 2 on n000 exited 1", 2, "n000")
    verdict = judge(over(healthy(), outcome=outcome, errors=lines))
    assert (verdict.node, verdict.rank) == ("n001", 6)
    assert "CUDA out of memory" in verdict.reason


def test_a_launcher_that_tells_of_its_children_is_not_quoted_beside_the_root() -> None:
    closed = make_line("RuntimeError: Connection closed by peer", node="n000", rank=2)
    launcher = make_line(
        "W1129 14:28:26.8 1 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process "
        "2 closing signal SIGTERM", node="n001", rank=6,
    )  # fmt: skip
    outcome = make_outcome(1, "rank 6 on n001 exited 1", 6, "n001")
    verdict = judge(over(healthy(), outcome=outcome, errors=(OOM, launcher, closed)))
    assert verdict.evidence == (OOM, closed)


def test_exits_tell_the_culprit_where_the_batch_script_left_no_outcome() -> None:
    snapshot = change_rank(healthy(), 6, exit=make_exit(6, "n001", 139, "SIGSEGV"))
    verdict = judge(over(snapshot, "COMPLETED"))
    assert (verdict.health, verdict.node, verdict.rank) == (Health.DEAD, "n001", 6)
    assert "SIGSEGV" in verdict.reason


def test_ranks_that_the_scheduler_ended_are_no_cause() -> None:
    why = "rank 6 on n001 was ended by SIGTERM"
    outcome = make_outcome(143, why, 6, "n001", culprit_signal="SIGTERM")
    verdict = judge(over(healthy(), "TIMEOUT", outcome=outcome))
    assert "time limit" in verdict.reason and verdict.rank is None
    verdict = judge(over(healthy(), "TIMEOUT", outcome=outcome, errors=(OOM,)))
    assert "time limit" in verdict.reason and "CUDA out of memory" in verdict.reason


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("TIMEOUT", "time limit"),
        ("CANCELLED", "cancelled"),
        ("PREEMPTED", "preempted"),
        ("OUT_OF_MEMORY", "memory"),
    ],
)
def test_the_schedulers_word_is_a_cause(state: str, said: str) -> None:
    outcome = make_outcome(143, "SIGTERM from the scheduler")
    verdict = judge(over(healthy(), state, outcome=outcome))
    is_cancel = state == "CANCELLED"
    assert verdict.health is (Health.CANCELLED if is_cancel else Health.DEAD)
    assert verdict.exit_code == (16 if is_cancel else 10)
    assert said in verdict.reason


def test_a_cancel_of_ours_needs_no_other_word() -> None:
    """Status had "SIGTERM from the scheduler (cancel, ...)" twice, and "submit again"."""
    said = "SIGTERM from the scheduler (cancel, time limit), seen first on n000"
    lines = (
        make_line(f"n000: stopping the attempt: {said}", node="n000"),
        make_line(f"attempt 0: code 143: {said}"),
    )
    ended = over(healthy(), "CANCELLED", outcome=make_outcome(143, said), errors=lines)
    ours = End(EndCause.CANCELLED, Actor.VJOB)
    own = judge(replace(ended, record_state="ended", record_verdict="CANCELLED", end=ours))
    assert own.health is Health.CANCELLED
    assert own.reason.startswith("cancelled with vjob cancel")
    assert own.evidence == () and "submit again" not in own.advice and "errors" not in own.advice
    assert "whether the program saved" in own.facts[-1]
    saved = make_line("Epoch 3 | Training snapshot saved at snapshot.pt", node="n000", rank=0)
    told = judge(replace(ended, end=ours, saved=saved)).facts[-1]
    assert told == (
        "rank 0 on n000 printed: Epoch 3 | Training snapshot saved at snapshot.pt; vjob did not "
        "check that this save can be loaded"
    )


def test_ranks_without_a_handler_for_the_early_signal_are_named() -> None:
    """Ranks ran into the time limit, and nothing said that SIGUSR1 had not reached them."""
    deaf = replace(change_node(healthy(), "n001", hears_usr1=False), warn_s=120.0)
    said = [one for one in judge(deaf).remarks if "SIGUSR1" in one]
    assert said == [
        "ranks on n001 have no handler for SIGUSR1, so they will not be asked to save 2 min "
        "before the time limit"
    ]
    assert not any("SIGUSR1" in one for one in judge(replace(deaf, warn_s=0.0)).remarks)
    ended = over(deaf, "TIMEOUT", outcome=make_outcome(143, ""), end=End(EndCause.TIME_LIMIT))
    assert any("were not asked to save" in one for one in judge(ended).facts)


def test_a_hang_that_a_person_ended_keeps_its_cause() -> None:
    hang = Hang(HangWitness.STOPPED, NOW - 700, NOW - 640, 1, "n1")
    ended = over(healthy(), "CANCELLED", outcome=replace(make_outcome(143, ""), ended=NOW - 100))
    said = judge(replace(ended, hang=hang)).facts
    assert any("to its end (10 min, " in one and "rank 1 on n1 is stopped" in one for one in said)
    assert any("may have hung" in one for one in judge(replace(ended, suspected=hang)).facts)
    went_on = judge(replace(ended, hang=replace(hang, until=NOW - 500)))
    assert not any("hung" in one for one in went_on.facts)


def test_a_run_that_failed_says_from_where_it_goes_on() -> None:
    """The folder may hold a checkpoint of an earlier run, which this one could not load."""
    failed = replace(killed(), checkpoint_step=40, checkpoint_at=NOW - 9, submitted=NOW - 99)
    assert any("step 40, from which the run continues" in one for one in judge(failed).facts)
    stranger = judge(replace(failed, checkpoint_at=NOW - 999, progress=None))
    assert "the last checkpoint is of step 40" in stranger.facts


def test_a_job_that_hung_until_its_time_limit_needs_no_more_time() -> None:
    points = make_points([0.3] * 5, end=NOW - 540)
    outcome = make_outcome(143, "SIGTERM from the scheduler")
    ended = over(with_points(healthy(ranks=()), points), "TIMEOUT", outcome=outcome)
    assert judge(ended).advice.startswith("no step in the last 9 min, so the run hung")
    late = over(with_points(healthy(ranks=()), make_points([0.3] * 5)), "TIMEOUT", outcome=outcome)
    assert judge(late).advice.startswith("raise cluster.walltime_min")
    points = make_points([3.0] * 9, every=100, end=NOW - 280)
    rare = over(with_points(healthy(ranks=()), points), "TIMEOUT", outcome=outcome)
    assert judge(rare).advice.startswith("raise cluster.walltime_min"), "a line every 300 s"


def test_a_rank_that_failed_before_a_cancel_is_what_ended_it() -> None:
    said = "rank 3 on n000 was ended by SIGSEGV"
    outcome = make_outcome(139, said, 3, "n000", culprit_signal="SIGSEGV")
    verdict = judge(over(healthy(), "CANCELLED", outcome=outcome))
    assert (verdict.health, verdict.rank) == (Health.DEAD, 3)


def test_a_lost_node_is_a_cause() -> None:
    why = "the agent on n003 exited without a message: rank 12 left no exit code"
    verdict = judge(over(healthy(), "NODE_FAIL", outcome=make_outcome(113, why, 12, "n003")))
    assert (verdict.health, verdict.node, verdict.rank) == (Health.DEAD, "n003", 12)
    assert "cluster.exclude" in verdict.advice
    assert verdict.reason == "the scheduler reports that node n003 failed", "not its silence"
    assert verdict.end is not None and verdict.main.cause is verdict.end.cause


def test_a_failed_node_is_the_one_that_srun_names_and_never_one_that_only_wrote_of_it() -> None:
    """slurmstepd of a node that is well says that the job ended for a failure."""
    texts = (
        "slurmstepd-n001: error: *** JOB 21 ON n001 CANCELLED AT x DUE TO NODE FAILURE, SEE LOG",
        "srun: error: Node failure on n003",
    )
    first, second = (Line(text=text, kind=classify_line(text) or "") for text in texts)
    end = End(EndCause.NODE_FAIL, Actor.NODE, code=143)
    lost = replace(over(healthy(), "NODE_FAIL", outcome=None), end=end)
    named = judge(replace(lost, errors=(first, second)))
    assert named.reason == "the scheduler reports that node n003 failed"
    assert "n001" not in named.advice and "n003" in named.advice
    unnamed = judge(replace(lost, errors=(first,)))
    assert unnamed.reason == "the scheduler reports that a node failed"
    assert "exclude" not in unnamed.advice


def test_a_line_that_the_record_quotes_is_said_once() -> None:
    what = "Error: initializing source docker://a/b:latest: no such host"
    outcome = make_outcome(1, f"not ready: n000: container: podman exited 125: {what}")
    line = make_line(f"vjob bash: {what}", node="n000")
    assert judge(over(healthy(), outcome=outcome, errors=(line,))).reason == outcome.reason


def test_a_batch_script_that_never_ran_says_why() -> None:
    snapshot = over(healthy(progress=None, nodes=(), ranks=(), attempt=None), "FAILED")
    jobs = (JobRow(id="4711", state="FAILED", exit_code="0:53", end_cause="no-output"),)
    lost = replace(snapshot, scheduler=Scheduler(name="slurm", jobs=jobs))
    assert "could not open the output file" in judge(lost).reason
    said = replace(snapshot, scheduler_lines=("module: command not found",))
    assert "command not found" in judge(said).reason


def bare(age: float, **facts: object) -> Snapshot:
    snapshot = healthy(scheduler=Scheduler(name=""), record_state="", attempt=None, **facts)
    return replace(snapshot, now=NOW + age)


def test_a_bare_folder_whose_last_step_is_done_is_done() -> None:
    points = make_points([STEP_S] * 50)
    assert judge(with_points(bare(1e6), points, num_steps=50)).health is Health.DONE
    asked = with_points(bare(1e6), points, num_steps=50, is_asked=True)
    assert judge(asked).health is not Health.DONE, "the conf's number may count something else"
    said = ("[after training is done] datetime: 2023-06-14 16:08:12 ",)
    assert judge(change_node(bare(1e6), "n000", out=said)).health is Health.DONE


def test_an_old_bare_folder_that_stopped_short_is_dead() -> None:
    verdict = judge(bare(1e6))
    assert (verdict.health, verdict.rule) == (Health.DEAD, "abandoned")
    assert "step 200 of 5000" in verdict.reason
    assert not any("no step" in remark for remark in verdict.remarks)
    assert judge(bare(1e6, progress=None)).health is Health.UNKNOWN
    assert judge(bare(1e6, progress=None, errors=(OOM,))).health is Health.DEAD


def test_a_young_bare_folder_is_judged_like_a_running_job() -> None:
    assert judge(bare(10)).health is Health.HEALTHY
    assert judge(bare(600)).health is Health.STALLED


@pytest.mark.parametrize("message", ["the time limit was reached", "time limit was reached", ""])
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("TIMEOUT", "the time limit was reached"),
        ("DEADLINE", "its deadline passed"),
        ("PREEMPTED", "preempted"),
        ("CANCELLED", "cancelled"),
    ],
)
def test_the_wording_of_the_record_decides_nothing(word: str, said: str, message: str) -> None:
    """Without its "the" the message of a job at its limit made status blame a kill -9."""
    killed_too = replace(killed(), record_state="ended", record_verdict=word, message=message)
    verdict = judge(with_state(killed_too, word))
    assert verdict.reason.startswith(said) and "kill -9" not in verdict.reason


def test_a_supervisor_that_died_is_no_lost_node() -> None:
    ended = over(killed(), "FAILED", outcome=killed().outcome)
    ended = replace(ended, record_state="ended", end=End(EndCause.SUPERVISOR_DIED))
    verdict = judge(ended)
    assert verdict.reason.startswith("the job's supervisor exited without recording an end")
    assert "node" not in verdict.reason


def test_of_an_array_the_element_that_failed_first_is_the_cause() -> None:
    """It was headed by the time limit of 61_0, a minute after 61_1 had failed."""
    limit = make_line("slurmstepd: error: *** JOB 62 ON b1 CANCELLED AT x DUE TO TIME LIMIT ***")
    rows = (
        JobRow(id="61_0", state="TIMEOUT", word="TIMEOUT", end_cause="time-limit", ends=NOW),
        JobRow(id="61_1", state="FAILED", word="FAILED", exit_code="1:0", ends=NOW - 56),
        JobRow(id="61_2", state="COMPLETED", word="COMPLETED", exit_code="0:0", ends=NOW - 90),
    )
    plain = Snapshot(now=NOW, run="61", folder="/x", scheduler=Scheduler(name="slurm", jobs=rows),
                     errors=(replace(limit, node="61_0"),))  # fmt: skip
    verdict = judge(plain)
    assert verdict.reason == "61_1: FAILED with exit code 1:0; the cause is not known"
    assert verdict.advice == "vjob logs 61_1 --errors" and choose_state(rows) == "FAILED"
    said = make_line("ValueError: shard 7", node="61_1", raised="last")
    assert judge(replace(plain, errors=(*plain.errors, said))).reason == "61_1: ValueError: shard 7"
    sooner = (replace(rows[0], ends=NOW - 99), *rows[1:])
    plain = replace(plain, scheduler=replace(plain.scheduler, jobs=sooner))
    assert judge(plain).reason.startswith("61_0: the time limit")


def test_an_abort_at_the_end_of_python_may_come_after_destroy_process_group() -> None:
    """The one advice was the program's last line already, and all steps were done and saved."""
    line = make_line("terminate called without an active exception", node="n001", rank=6)
    outcome = make_outcome(134, "rank 6 on n001 was ended by SIGABRT", 6, "n001")
    verdict = judge(over(healthy(), outcome=replace(outcome, culprit_signal="SIGABRT"),
                         errors=(line,)))  # fmt: skip
    assert "when Python ended" in verdict.advice and "if it does, something may" in verdict.advice


def test_a_run_whose_ranks_all_exited_needs_no_more_time() -> None:
    """`all 2 ranks exited 0` stood beside `at its pace it needs 3 min more`."""
    row = replace(healthy().scheduler.jobs[0], left_s=300.0)
    ending = healthy(scheduler=Scheduler(name="slurm", jobs=(row,)))
    assert "time limit" in judge(ending).reason
    for rank in ending.ranks:
        ending = change_rank(ending, rank.rank, exit=make_exit(rank.rank, rank.node, 0))
    assert "ranks exited 0" in judge(ending).reason
    assert not any("limit" in remark or "pace" in remark for remark in judge(ending).remarks)

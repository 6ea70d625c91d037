"""Snapshots of Slurm jobs that vjob did not submit."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vjob.jobs.errors import UncertainError
from vjob.jobs.monitor.model.snapshot import Health, Verdict
from vjob.jobs.monitor.model.text import format_progress
from vjob.jobs.monitor.readers.job_reader import JudgedReader, open_reader
from vjob.jobs.monitor.readers.slurm_job import SeenTimes, build_gpu_command, parse_gpus
from vjob.jobs.schedulers import broker
from vjob.jobs.schedulers.broker import Answer
from vjob.jobs.schedulers.slurm.foreign_job import parse_parts

LINE = (
    "JobId=12 JobName=own UserId={user}({uid}) GroupId=g(0) JobState={state} Reason={reason} "
    "Restarts=0 ExitCode={code} TimeLimit=01:00:00 SubmitTime={begun} StartTime={begun} "
    "EndTime=Unknown Partition=gpu2 NodeList={nodes} NumNodes=1 TRES=cpu=1{tres} "
    "Command=/x/job.sh WorkDir={folder} StdErr={folder}/job-%j.out StdIn=/dev/null "
    "StdOut={folder}/job-12.out Power="
)
BEGUN_S = 100.0


@dataclass
class FakeSlurm:
    """Answers as scontrol, and as nvidia-smi under srun."""

    folder: Path
    state: str = "RUNNING"
    reason: str = "None"
    code: str = "0:0"
    nodes: str = "b1"
    tres: str = ""
    uid: int = field(default_factory=os.geteuid)
    is_away: bool = False
    gpus: str = ""
    asked: list[str] = field(default_factory=list)

    def ask(self, command: Sequence[str], **facts: float) -> Answer:
        self.asked.append(command[0])
        if self.is_away:
            raise UncertainError("the controller is away")
        text = self.gpus if command[0] == "srun" else ""
        if command[0] == "scontrol":
            begun = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - BEGUN_S))
            facts_now = {name: getattr(self, name) for name in self.__annotations__}
            text = LINE.format(user="ann", begun=begun, **facts_now) + "\n"
        return Answer(text=text, asked=time.time())


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fake = FakeSlurm(tmp_path)
    monkeypatch.setattr(broker, "ask", fake.ask)
    monkeypatch.setattr("vjob.jobs.runs.find._explain_removed", lambda job: "")
    return fake


def write(folder: Path, first: int, last: int) -> None:
    with (folder / "job-12.out").open("a") as handle:
        for step in range(first, last + 1):
            handle.write(f"step {step}/100 loss {4 / step:.3f}\n")


def test_a_loop_whose_lines_have_no_times_has_a_step_and_no_pace(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    """Its mean since the job started had the start-up in it: 0.49 s a step of 0.21 s."""
    write(tmp_path, 1, 50)
    snapshot, verdict = JudgedReader(open_reader("12", tmp_path)).read()
    assert snapshot.progress is not None and snapshot.progress.step == 50
    assert verdict.health is Health.HEALTHY and "step 50 of 100" in verdict.reason
    assert "a step" not in verdict.reason and " left" not in verdict.reason
    assert [node.name for node in snapshot.nodes] == ["b1"] and slurm.asked == ["scontrol"] * 2


def test_a_step_before_many_other_lines_has_no_known_age_and_no_time_left(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    """A job that waited for hours, and said so, was `HEALTHY: step 50 of 1000 2 s ago, 8 min
    left`."""
    log = tmp_path / "job-12.out"
    steps = [f"step {step}/1000 loss {4 / step:.3f} step time 0.5 s\n" for step in range(1, 51)]
    log.write_text("".join(steps) + "loader: waiting for the file server\n" * 500)
    reader = JudgedReader(open_reader("12", tmp_path))
    snapshot, verdict = reader.read()
    assert verdict.health is Health.RUNNING and " left" not in verdict.reason
    assert verdict.reason.endswith("0.5 s a step; its log goes on without a later step")
    assert "step 50 of 1000 more than " in verdict.reason
    assert "more than" in format_progress(snapshot, is_over=False)
    with log.open("a") as handle:
        handle.write(steps[-1].replace("step 50", "step 51"))
    _, verdict = reader.read()
    assert verdict.health is Health.HEALTHY and "step 51 of 1000 0" not in verdict.reason
    assert "more than" not in verdict.reason and " left" in verdict.reason


def test_a_block_after_a_step_does_not_make_it_old(slurm: FakeSlurm, tmp_path: Path) -> None:
    block = "".join(f"  layer {layer}: norm 1.0\n" for layer in range(100))
    text = "".join(f"step {step}/100 loss {4 / step:.3f}\n{block}" for step in range(1, 31))
    (tmp_path / "job-12.out").write_text(text + block)
    _, verdict = JudgedReader(open_reader("12", tmp_path)).read()
    assert verdict.health is Health.HEALTHY and "more than" not in verdict.reason


def test_a_job_that_is_no_training_is_running_and_its_steps_are_not_known(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    (tmp_path / "job-12.out").write_text("hello\n")
    os.utime(tmp_path / "job-12.out", (1, 1))
    snapshot, verdict = JudgedReader(open_reader("12", tmp_path)).read()
    assert (verdict.health, snapshot.progress) == (Health.RUNNING, None)
    assert "steps not known" in verdict.reason
    assert "cluster." not in verdict.advice and "progress" not in verdict.advice


def test_a_job_that_never_starts_says_which_option_of_sbatch_to_change(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.state, slurm.reason, slurm.nodes = "PENDING", "PartitionTimeLimit", ""
    _, verdict = JudgedReader(open_reader("12", tmp_path)).read()
    assert (verdict.health, verdict.exit_code) == (Health.PENDING, 12)
    assert verdict.advice == "scancel 12; lower --time; submit again"
    assert "cluster." not in verdict.reason + verdict.advice


@pytest.mark.parametrize(
    ("state", "code", "health"),
    [
        ("COMPLETED", "0:0", Health.DONE),
        ("FAILED", "3:0", Health.DEAD),
        ("TIMEOUT", "0:15", Health.DEAD),
        ("CANCELLED", "0:15", Health.CANCELLED),
    ],
)
def test_an_end_is_judged_as_that_of_a_run(
    slurm: FakeSlurm, tmp_path: Path, state: str, code: str, health: Health
) -> None:
    slurm.state, slurm.code = state, code
    write(tmp_path, 1, 5)
    _, verdict = JudgedReader(open_reader("12", tmp_path)).read()
    assert verdict.health is health
    assert "report" not in verdict.advice and "checkpoint" not in verdict.advice
    assert "did not submit" not in verdict.reason


def test_an_exit_code_is_the_reason_where_no_line_is_proof(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    """An exception's name that a shell printed: its process ended by itself, with a code of its
    own."""
    slurm.state, slurm.code = "FAILED", "3:0"
    (tmp_path / "job-12.out").write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    _, verdict = JudgedReader(open_reader("12", tmp_path)).read()
    assert "exit code 3" in verdict.reason


STEPS = "".join(f"step {step}/100 loss 1.0\n" for step in range(1, 6))
STACK = '[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File "t.py", line 4, in main\n'
LOST = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:545] Connection {} by peer [10.0.0.4]:53"
TORCHRUN = """\
E1130 05:24:20.365 13529 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_05:24:20
  host      : {node}
  rank      : {rank} (local_rank: 0)
  exitcode  : {code} (pid: 1365{rank}) 
  error_file: <N/A>
srun: error: {node}: task {rank}: Exited with exit code 1
"""


def judge_log(slurm: FakeSlurm, text: str) -> Verdict:
    """Judge a failed job of two nodes that wrote `text` into the one file of its batch script."""
    slurm.state, slurm.code, slurm.nodes = "FAILED", "1:0", "b[1-2]"
    (slurm.folder / "job-12.out").write_text(text)
    return JudgedReader(open_reader("12", slurm.folder)).read()[1]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_rank_that_torchrun_names_is_the_cause_on_the_node_that_it_names(
    slurm: FakeSlurm, order: tuple[int, int]
) -> None:
    """Rank 0 printed one more step, and lost rank 1; the file is of b1, where the script ran."""
    ends = [TORCHRUN.format(node=f"b{rank + 1}", rank=rank, code=1) for rank in order]
    raised = f"{STEPS}{STACK.format(1)}[rank1]: ValueError: bad sample\nstep 6/100 loss 1.0\n"
    verdict = judge_log(slurm, f"{raised}{STACK.format(0)}{LOST.format('closed')}\n{''.join(ends)}")
    assert verdict.reason == "rank 1 on b2: ValueError: bad sample"
    assert (verdict.rank, verdict.node) == (1, "b2")


def test_the_node_of_a_line_in_the_file_of_several_nodes_is_not_known(slurm: FakeSlurm) -> None:
    verdict = judge_log(slurm, f"{STACK.format(1)}[rank1]: ValueError: bad sample\n")
    assert verdict.reason == "rank 1: ValueError: bad sample" and not verdict.node
    end = "step 6/100 loss 1.0\nsrun: error: b2: task {}: Exited with exit code 1\n"
    raised = f"{STEPS}{STACK.format(1)}[rank1]: ValueError: bad sample\n"
    assert "ValueError" in judge_log(slurm, raised + end.format(1)).reason
    assert "ValueError" not in judge_log(slurm, raised + end.format(0)).reason, "rank 1 went on"


PEER = "srun: error: b1: task 0: Exited with exit code 1\n"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (f"srun: error: b2: task 1: Killed\n{PEER}", "task 1 on b2 was ended by SIGKILL"),
        (f"{PEER}srun: error: b2: task 1: Exited with exit code 7\n", "task 1 on b2 exited 7"),
        (TORCHRUN.format(node="b2", rank=1, code=-9), "rank 1 on b2 was ended by SIGKILL"),
        (TORCHRUN.format(node="b2", rank=1, code=7), "rank 1 on b2 exited 7"),
    ],
)
def test_an_end_that_a_launcher_reports_comes_before_what_a_peer_lost(
    slurm: FakeSlurm, end: str, said: str
) -> None:
    lost = f"{STEPS}{STACK.format(0)}{LOST.format('reset')}\n"
    verdict = judge_log(slurm, f"{lost}{end}srun: Force Terminated StepId=31.1\n")
    assert verdict.reason.startswith(said) and verdict.node == "b2"
    assert "first error of that process" not in verdict.advice
    ended = f"{lost}srun: Terminating StepId=31.1\nsrun: error: b2: task 1: Killed\n"
    assert "SIGKILL" not in judge_log(slurm, ended).reason, "srun itself kills what is left"
    assert not judge_log(slurm, f"{end}{lost}{end}").reason.startswith(said), "whose, of two steps?"


def test_a_controller_that_goes_away_leaves_what_was_known(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    write(tmp_path, 1, 5)
    reader = JudgedReader(open_reader("12", tmp_path))
    reader.read()
    slurm.is_away = True
    write(tmp_path, 6, 9)
    snapshot, verdict = reader.read()
    assert snapshot.progress is not None and snapshot.progress.step == 9
    assert snapshot.scheduler.problem == "the controller is away"
    assert verdict.health is Health.HEALTHY


def test_gpus_are_asked_of_our_own_jobs_alone(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.tres = ",gres/gpu=1"
    slurm.gpus = "b1|nvidia|0, NVIDIA A10, 61, 97, 20000, 23028, [N/A]\n"
    write(tmp_path, 1, 5)
    snapshot, _ = JudgedReader(open_reader("12", tmp_path)).read()
    (gpu,) = snapshot.nodes[0].gpus
    assert (gpu.name, gpu.utilization, gpu.temperature, gpu.power_w) == (
        "NVIDIA A10", 97.0, 61.0, None
    )  # fmt: skip
    slurm.uid, slurm.asked = os.geteuid() + 1, []
    snapshot, _ = JudgedReader(open_reader("12", tmp_path)).read()
    assert slurm.asked == ["scontrol"] * 2 and "GPUs are not known: the job" in snapshot.message
    assert "belongs to ann" in snapshot.message


def test_the_step_for_the_gpus_gives_up_where_it_would_wait(slurm: FakeSlurm) -> None:
    text = slurm.ask(["scontrol"]).text
    (part,) = parse_parts(text)
    words = build_gpu_command(part)
    assert {"--overlap", "--jobid=12", "--immediate=10", "--nodes=1"} <= set(words)
    (part,) = parse_parts(text.replace("JobId=12 ", "JobId=13 HetJobId=12 HetJobOffset=1 "))
    assert {"--jobid=12", "--het-group=1"} <= set(build_gpu_command(part))
    assert parse_gpus("srun: error\nb1|x, y\n") == {}


@pytest.mark.parametrize(
    ("said", "verdict", "words"),
    [
        ("Unable to determine the device handle for GPU1: 0000:3B:00.0: GPU is lost.",
         Health.FAILING, "GPU 1 of b1 is lost"),
        ("Failed to initialize NVML: Driver/library version mismatch", Health.RUNNING,
         "GPUs not read: b1: nvidia-smi: Failed to initialize NVML"),
    ],
)  # fmt: skip
def test_gpus_that_do_not_answer_are_told(
    said: str, verdict: Health, words: str, slurm: FakeSlurm, tmp_path: Path
) -> None:
    row = "b1|nvidia|0, NVIDIA A10, 61, 97, 20000, 23028, 90\n" * ("is lost" in said)
    slurm.tres, slurm.gpus = ",gres/gpu=2", f"{row}b1|nvidia|{said}\n"
    write(tmp_path, 1, 5)
    _, found = JudgedReader(open_reader("12", tmp_path)).read()
    assert found.health is verdict
    assert words in " ".join([found.reason, *found.remarks])


def test_lines_between_two_looks_have_the_time_of_the_first() -> None:
    seen = SeenTimes()
    seen.note(100.0, 0, 0)
    seen.note(110.0, 50, 0)
    seen.note(130.0, 90, 0)
    out, _ = seen.read()
    assert out.find_exact(10) == (100.0, 10.0)
    assert out.find_exact(50) == (110.0, 20.0)
    assert out.find_exact(95) == (None, 0.0)

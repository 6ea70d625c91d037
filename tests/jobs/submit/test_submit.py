"""Submitting where Slurm answers late, wrongly or not at all: no job is lost, none is invented.

The tools on PATH are scripts that say what the real ones say; tests/cluster has the real ones.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.command import PROGRAMS, Vjob, wait_for
from tests.jobs.stub_programs import forget_answers
from varuna_core.records.exits import Outcome, write_outcome
from varuna_core.records.runfolder import RunFolder

ONE = f"""
name: one
program: {{script: {PROGRAMS}/report_rank.py}}
cluster: {{scheduler: slurm, nodes: [{{group: m}}]}}
"""
TWO = f"""
name: two
program: {{script: {PROGRAMS}/report_rank.py}}
cluster: {{scheduler: slurm, hetero: split, nodes: [{{group: m}}, {{group: s}}]}}
"""
TIMED_OUT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
OLD = "99|N/A|N/A|{word}|n1|None|0|N/A|vjob:{run}||10:00|N/A|N/A|(null)|0|"


class FakeSlurm:
    """What each tool prints and exits with, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.say("sbatch", "echo 77")
        self.say("squeue", f'echo "{TIMED_OUT}" >&2; exit 1')
        for name in ("scontrol", "sacct", "scancel"):
            self.say(name, "true")

    def say(self, name: str, body: str) -> None:
        tool = self.folder / name
        part = tool.with_suffix(".part")
        part.write_text(f'#!/bin/bash\necho "{name} $*" >> "{self.folder}/asked"\n{body}\n')
        part.chmod(0o755)
        part.rename(tool)
        forget_answers(self.folder.parent)

    def queue(self, *rows: str) -> None:
        text = "\n".join(rows)
        self.say("squeue", f"cat <<'E'\n{text}\nE" if rows else "true")

    def asked(self) -> str:
        path = self.folder / "asked"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "tools")


@pytest.fixture
def vjob(slurm: FakeSlurm, tmp_path: Path) -> Vjob:
    return Vjob(tmp_path, {"PATH": f"{slurm.folder}:{os.environ['PATH']}"})


def only_run(vjob: Vjob) -> RunFolder:
    (record,) = vjob.folder.glob("log/*-*/record.json")
    return RunFolder(record.parent)


def read(run: RunFolder) -> dict[str, object]:
    record: dict[str, object] = json.loads(run.record.read_text())
    return record


def age(run: RunFolder, seconds: float) -> None:
    run.record.write_text(json.dumps({**read(run), "submitted": time.time() - seconds}))


def test_a_job_id_is_known_from_any_folder(vjob: Vjob, tmp_path: Path) -> None:
    run = vjob.submit(ONE)
    (tmp_path / "else").mkdir()
    vjob.folder = tmp_path / "else"
    assert vjob.status("77")["run"] == run.name


def test_a_submit_says_that_its_partition_counts_embedding_and_head(
    vjob: Vjob, slurm: FakeSlurm
) -> None:
    slurm.say("sbatch", "echo 77")
    conf = ONE.replace(f"{{script: {PROGRAMS}/report_rank.py}}", "pretrain_gpt").replace(
        "{group: m}", "{group: m, ranks: 2}"
    )
    conf += "model: {layers: 6, hidden: 64, heads: 4, vocab: 512}\ndata: {synthetic: true}\n"
    conf += "parallel: {pipeline: 2, partition: 3-5}\n"
    said = vjob("submit", vjob.write(conf)).stdout
    assert "plan    partition 3-5 has embedding and head; its layers are 2-4 of 6" in said


def test_an_answer_that_was_lost_is_no_refusal_and_the_job_is_adopted(
    vjob: Vjob, slurm: FakeSlurm
) -> None:
    slurm.say("sbatch", 'echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1')
    assert "may exist all the same" in vjob("submit", vjob.write(ONE), code=1).stderr
    run = only_run(vjob)
    assert read(run)["state"] == "intent"
    age(run, 900)
    vjob.status("last")
    assert read(run)["state"] == "intent", "squeue did not answer: nothing is concluded"
    slurm.queue(OLD.format(word="RUNNING", run=run.name))
    assert vjob.status("last")["state"] == "RUNNING"
    assert read(run)["jobs"] == [{"id": "99", "group": None}]


def test_a_submit_that_never_reached_slurm_is_called_refused_in_the_end(
    vjob: Vjob, slurm: FakeSlurm
) -> None:
    slurm.say("sbatch", 'echo "Socket timed out" >&2; exit 1')
    vjob("submit", vjob.write(ONE), code=1)
    slurm.queue()
    assert vjob.status("last")["state"] == "INTENT"
    age(only_run(vjob), 900)
    assert vjob.status("last")["state"] == "REFUSED"


def test_a_controller_that_does_not_answer_ends_no_run(vjob: Vjob) -> None:
    """A requeued run has an outcome of its first attempt while the job pends anew."""
    run = vjob.submit(ONE)
    attempt = run.attempt(0)
    attempt.make()
    write_outcome(attempt, Outcome(143, "preempted", None, None, None, [], 1.0))
    assert json.loads(vjob("status", "last", "--json", code=11).stdout)["state"] == "UNKNOWN"
    assert read(run)["state"] == "submitted"


def test_a_forgotten_job_without_an_outcome_is_said_to_be_so(vjob: Vjob, slurm: FakeSlurm) -> None:
    run = vjob.submit(ONE)
    slurm.queue()
    age(run, 900)
    assert "has forgotten" in vjob("status", "last", code=10).stdout


def test_a_second_half_that_is_refused_takes_back_the_first(vjob: Vjob, slurm: FakeSlurm) -> None:
    slurm.say("sbatch", f'[ -e "{slurm.folder}/once" ] && {{ echo "sbatch: error: invalid partition'
              f' specified: x" >&2; exit 1; }}; touch "{slurm.folder}/once"; echo 77')  # fmt: skip
    said = vjob("submit", vjob.write(TWO), code=1).stderr
    assert "invalid partition" in said and "scancel 77" in slurm.asked()
    record = read(only_run(vjob))
    assert record["state"] == "refused"
    end = record["end"]
    assert (end["cause"], end["actor"], end["started"]) == ("refused", "scheduler", False)


def test_what_cannot_be_taken_back_is_named(vjob: Vjob, slurm: FakeSlurm) -> None:
    slurm.say("scancel", "exit 1")
    slurm.say("sbatch", f'[ -e "{slurm.folder}/once" ] && {{ echo "sbatch: error: invalid partition'
              f' specified: x" >&2; exit 1; }}; touch "{slurm.folder}/once"; echo 77')  # fmt: skip
    said = vjob("submit", vjob.write(TWO), code=1).stderr
    assert "invalid partition" in said and "Could not be cancelled: job 77" in said
    assert read(only_run(vjob))["state"] == "intent"


def test_half_a_split_run_is_not_adopted_but_ended(vjob: Vjob, slurm: FakeSlurm) -> None:
    slurm.say("sbatch", f'[ -e "{slurm.folder}/once" ] && kill -9 $PPID; '
              f'touch "{slurm.folder}/once"; echo 77')  # fmt: skip
    vjob("submit", vjob.write(TWO), code=None)
    run = only_run(vjob)
    age(run, 1)
    record = {**read(run), "state": "intent", "pid": 0, "jobs": [{"id": "77", "group": "m"}]}
    run.record.write_text(json.dumps(record))
    slurm.queue()
    assert vjob.status("last")["state"] == "REFUSED"
    assert "scancel 77" in slurm.asked()


def test_ctrl_c_in_a_terminal_reaches_sbatch_and_harms_nothing(
    vjob: Vjob, slurm: FakeSlurm
) -> None:
    """A terminal sends it to the whole group; sbatch must live to print its id."""
    slurm.say("sbatch", f'touch "{slurm.folder}/called"; sleep 1; echo 77')
    child = vjob.start("submit", vjob.write(ONE), start_new_session=True)
    wait_for((slurm.folder / "called").exists, 30)
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(timeout=60) == 130
    assert read(only_run(vjob))["jobs"] == [{"id": "77", "group": None}]


def test_a_dry_run_needs_no_slurm(vjob: Vjob) -> None:
    vjob.env["PATH"] = "/nowhere"
    assert "#SBATCH --job-name=one" in vjob("submit", vjob.write(ONE), "--dry-run").stdout
    assert "sbatch is not on PATH" in vjob("submit", "conf.yaml", code=2).stderr


def test_a_dry_run_shows_the_shell_scripts_of_a_container_line_by_line(vjob: Vjob) -> None:
    """One was printed as a line of 7,341 characters."""
    vjob.env["PATH"] = "/nowhere"
    container = "container: {runtime: podman, image: docker.io/library/debian}\n"
    shown = vjob("submit", vjob.write(ONE + container), "--dry-run").stdout
    assert max(map(len, shown.splitlines())) < 400
    text = shown.partition("plan.json\n")[2].replace("\n# ", "\n").removeprefix("# ")
    (prepare, *_) = json.loads(text)["containers"][0]["prepare"]
    assert prepare[:2] == ["bash", "-c"] and "set -euo pipefail" in prepare[2]


@pytest.mark.parametrize(
    ("groups", "left_out"),
    [
        (["{group: m, count: 20000}", "{group: s}"], '"0,1,2,3,4, ... 19995 more ... ,20000;"'),
        ([f"{{group: m{n}}}" for n in range(30)], "\n# ... 25 more files ...\n"),
    ],
)
def test_a_dry_run_of_a_large_conf_shows_the_first_and_the_last(
    vjob: Vjob, groups: list[str], left_out: str
) -> None:
    vjob.env["PATH"] = "/nowhere"
    conf = TWO.replace("{group: m}, {group: s}", ", ".join(groups))
    shown = vjob("submit", vjob.write(conf), "--dry-run").stdout
    assert left_out in shown and len(shown) < 80_000
    assert "plan.json" in shown and "node.sh" in shown


def test_a_dry_run_warns_of_a_variable_that_a_submit_refuses_to_miss(vjob: Vjob) -> None:
    name = vjob.write(ONE + "pass_env: [HF_TOKEN]\n")
    done = vjob("submit", name, "--dry-run")
    assert done.stderr.startswith("vjob: conf.yaml:5: pass_env[0] = HF_TOKEN: is not set in this")
    assert "#SBATCH" in done.stdout
    said = vjob("submit", name, code=2).stderr
    assert "1 problem in the conf:\n  conf.yaml:5: pass_env[0] = HF_TOKEN: is not set" in said
    vjob.env["HF_TOKEN"] = "hunter2"
    assert vjob("submit", name, "--dry-run").stderr == ""


def test_a_refusal_shows_slurms_words_once_and_then_the_remedy(
    vjob: Vjob, slurm: FakeSlurm
) -> None:
    said = "sbatch: error: invalid partition specified: x"
    slurm.say("sbatch", f'echo "{said}" >&2; echo "sbatch: error: Batch job refused" >&2; exit 1')
    lines = vjob("submit", vjob.write(ONE), code=1).stderr.splitlines()
    assert lines[:3] == [
        "vjob: sbatch refused the job:",
        f"    {said}",
        "    sbatch: error: Batch job refused",
    ]
    assert "sinfo -s" in lines[3] and lines[4].startswith("  The scripts are in ")
    assert len(lines) == 5
    row = vjob("list").stdout.splitlines()[-1]
    assert f"sbatch refused the job: {said}" in row
    assert not (Path(lines[4].rpartition(" ")[2]) / "agent.pyz").exists(), "it lies there for good"


def test_an_index_that_cannot_be_written_is_told_once_with_what_follows(
    vjob: Vjob, tmp_path: Path
) -> None:
    """A file stands where its folder should be."""
    (tmp_path / "state").write_text("")
    done = vjob("submit", vjob.write(ONE))
    (run,) = vjob.folder.glob("log/*-*")
    warnings = [line for line in done.stderr.splitlines() if "index" in line]
    assert len(warnings) == 1 and warnings[0].startswith("vjob: the index in ")
    assert "`vjob list` and `last` will not show this run" in warnings[0]
    assert warnings[0].endswith(str(run))
    assert vjob.status(str(run))["run"] == run.name


def test_a_list_whose_index_cannot_be_read_says_so(vjob: Vjob, tmp_path: Path) -> None:
    assert "no runs yet" in vjob("list").stdout
    (tmp_path / "state").write_text("")
    for options in ((), ("--json",)):
        done = vjob("list", *options, code=1)
        assert done.stdout == "" and "cannot be read: Not a directory" in done.stderr


def test_a_job_that_never_starts_has_the_reason_that_slurm_gives_once_it_considered_it(
    vjob: Vjob, slurm: FakeSlurm
) -> None:
    """Slurm's first word for three nodes of a queue with two is PartitionConfig, and vjob advised
    on the time as well."""
    slurm.say("squeue", 'n=$(grep -c ^squeue "${0%/*}/asked")\n'
              '[ "$n" -gt 1 ] && reason=PartitionNodeLimit || reason=PartitionConfig\n'
              'echo "77|N/A|N/A|PENDING||$reason|0|N/A|vjob:x||9:00|N/A|N/A|x|0|"')  # fmt: skip
    said = vjob("submit", vjob.write(ONE)).stderr
    assert "job 77 will not start: PartitionNodeLimit" in said and "lower count" in said
    assert "walltime_min" not in said


@pytest.mark.parametrize(("kill_wait", "is_told"), [("10 sec", True), ("30 sec", False)])
def test_a_submit_tells_of_a_grace_that_slurm_cuts_short(
    vjob: Vjob, slurm: FakeSlurm, kill_wait: str, is_told: bool
) -> None:
    slurm.say("scontrol", f'[ "$*" = "show config" ] && echo "KillWait = {kill_wait}"; true')
    said = vjob("submit", vjob.write(ONE)).stderr
    assert ("vjob: Slurm kills 10 s after TERM (KillWait)" in said) is is_told
    assert ("set cluster.grace_s: 5 or less" in said) is is_told


def test_filters_of_the_users_own_do_not_hide_jobs(vjob: Vjob, slurm: FakeSlurm) -> None:
    vjob.env["SQUEUE_PARTITION"] = "other"
    slurm.say("squeue", f'env > "{slurm.folder}/env"')
    vjob.submit(ONE)
    assert "SQUEUE_PARTITION" not in (slurm.folder / "env").read_text()


def test_gpus_of_a_machine_without_any_are_refused_at_submit(tmp_path: Path) -> None:
    """The run failed at its preflight."""
    vjob = Vjob(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    conf = ONE.replace("slurm, nodes: [{group: m}", "local, nodes: [{group: m, gpus: 1}")
    said = vjob("submit", vjob.write(conf), code=2).stderr
    assert "leave out gpus and give ranks: N" in said
    assert not (tmp_path / "log").exists()
    vjob("submit", vjob.write(conf), "--dry-run")


def test_a_folder_of_the_users_own_is_not_replaced_by_a_link(vjob: Vjob) -> None:
    (vjob.folder / "log").mkdir()
    (vjob.folder / "log/one").symlink_to("/somewhere")
    vjob.submit(ONE)
    assert os.readlink(vjob.folder / "log/one") == "/somewhere"

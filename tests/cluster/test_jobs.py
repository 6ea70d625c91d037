"""vjob on the real Slurm of the lab: layouts, losses, cancels, and what sbatch refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.lab import Lab
from tests.command import PROGRAMS, Vjob, read_out, read_rank, wait_for
from varuna_core.records.nodes import read_report
from varuna_core.records.record import read_record, write_record
from varuna_core.records.runfolder import RunFolder

pytestmark = pytest.mark.slurm

LAYOUTS = {
    "single": ("auto", "    - {group: all, count: 6, queue: all, ranks: 2}"),
    # Component 0 on b*: Slurm sorts a* first in the step's node list, rank 0 is on b1 all the same.
    "hetjob": (
        "hetjob",
        '    - {group: weak, count: 4, queue: gpu2, gpus: "a10:4", ranks: 2, cpus: 2}\n'
        '    - {group: strong, count: 2, queue: gpu1, gpus: "a100:4", cpus: 4}',
    ),
    "split": (
        "split",
        '    - {group: weak, count: 4, queue: gpu2, gpus: "a10:4", ranks: 2}\n'
        '    - {group: strong, count: 2, queue: gpu1, gpus: "a100:4"}',
    ),
}

CONF = """
name: {name}
program: {{script: {script}, args: {args}}}
cluster:
  scheduler: slurm
  hetero: {hetero}
  walltime_min: 5
  grace_s: 3
  join_s: 60
  lost_s: 15
  requeue: {requeue}
{more}
  nodes:
{nodes}
env: {{NOTE: "it's \\"$(id)\\"\\nünï"}}
"""


def usually(*names: str) -> list[Any]:
    """These layouts, and the others in `make test-long`."""
    return [pytest.param(one, marks=[pytest.mark.long] * (one not in names)) for one in LAYOUTS]


@pytest.fixture
def vjob(clean_lab: Lab, tmp_path: Path) -> Vjob:
    return Vjob(tmp_path, clean_lab.env)


def conf(
    program: str = "report_rank.py",
    args: list[str] | None = None,
    layout: str = "single",
    requeue: bool = False,
    more: str = "",
    nodes: str | None = None,
) -> str:
    hetero, groups = LAYOUTS[layout]
    return CONF.format(
        name=layout,
        script=PROGRAMS / program,
        args=json.dumps(args or []),
        hetero=hetero,
        nodes=nodes or groups,
        requeue=str(requeue).lower(),
        more=more,
    )


TWO_NODES = "    - {group: pair, count: 2, queue: gpu2, ranks: 2}"


def wait_ready(vjob: Vjob, run: RunFolder, count: int, attempt: int = 0) -> None:
    def is_ready() -> bool:
        return read_out(run, attempt).count("ready") == count

    wait_for(is_ready, 60, lambda: vjob.explain(run))


def test_a_script_for_varunas_launcher_gets_its_arguments(vjob: Vjob) -> None:
    (vjob.folder / "show.py").write_text("import sys; print(*sys.argv[1:])")
    text = conf(args=["--lr", "1"], layout="hetjob")
    text = text.replace(str(PROGRAMS / "report_rank.py"), "show.py, arguments: varuna")
    sizes = "train: {global_batch_size: 16, micro_batch_size: 2}\nparallel: {pipeline: 4}\n"
    run = vjob.submit(text + sizes)
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    places = "0,1,2,3;4,5,6,7;8,9,10,11;12,13,14,15;"
    for rank, local in ((0, 0), (3, 1), (15, 3)):
        words = f"--rank={rank} --local_rank={local} --stage_to_rank_map={places} "
        out = read_rank(run, rank)
        assert out.startswith(words + "--chunk_size=2 --batch-size=4 --lr 1"), out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_is_right_on_six_nodes(vjob: Vjob, clean_lab: Lab, layout: str) -> None:
    run = vjob.submit(conf(args=["a b"], layout=layout))
    record = vjob.wait_over(run)
    assert record["verdict"] == "COMPLETED", vjob.explain(run)
    rows = {row["rank"]: row for row in map(json.loads, read_out(run).splitlines())}
    shape = [2] * 6 if layout == "single" else [2, 2, 2, 2, 4, 4]
    assert sorted(rows) == list(range(sum(shape)))
    hosts = [rows[rank]["host"] for rank in sorted(rows)]
    wanted = sorted(clean_lab.nodes) if layout == "single" else ["b1", "b2", "b3", "b4", "a1", "a2"]
    assert hosts == [host for host, ranks in zip(wanted, shape, strict=True) for _ in range(ranks)]
    for row in rows.values():
        assert row["peer"] == clean_lab.node_addresses[row["host"]], "seen from its own address"
        assert row["interface"] == "eth0"
        assert (row["note"], row["args"]) == ('it\'s "$(id)"\nünï', ["a b"])
        assert row["leak"] is None
    local = [rows[rank]["local_rank"] for rank in sorted(rows)]
    assert local == [number for ranks in shape for number in range(ranks)]
    report = read_report(run.attempt(0), 0)
    assert report is not None and "NOTE" not in report.environment
    if layout != "single":
        assert {row["gpus"] for row in rows.values()} == {"0,1,2,3"}
    assert len(record["jobs"]) == (2 if layout == "split" else 1)


@pytest.mark.parametrize("layout", usually("single", "split"))
def test_a_rank_that_exits_9_is_named_and_is_the_jobs_exit_code(
    vjob: Vjob, clean_lab: Lab, layout: str
) -> None:
    run = vjob.submit(conf("fail_as_told.py", ["5", "exit:9"], layout))
    record = vjob.wait_over(run, timeout_s=60)
    outcome = record["outcome"]
    node = "a3" if layout == "single" else "b3"
    assert (outcome["code"], outcome["culprit_rank"]) == (9, 5)
    assert outcome["culprit_node"] == {"single": "b1"}.get(layout, node)
    assert "ValueError: this is the end" in record["message"]
    job = record["jobs"][0]["id"]
    said = clean_lab.run(["scontrol", "-o", "show", "job", job]).stdout
    assert "ExitCode=9:0" in said


def test_a_rank_killed_by_kill_9_is_named_with_its_signal(vjob: Vjob) -> None:
    run = vjob.submit(conf("fail_as_told.py", ["3", "kill"], "hetjob"))
    outcome = vjob.wait_over(run, timeout_s=60)["outcome"]
    assert (outcome["culprit_rank"], outcome["culprit_signal"]) == (3, "SIGKILL")
    assert outcome["culprit_node"] == "b2"


def start_together(vjob: Vjob, *args: str, more: str = "", **nodes: str) -> dict[str, RunFolder]:
    """A run in each layout, of 12 ranks that are ready, all on the same nodes: what happens to one
    of these, all have in one wait."""
    runs = {}
    for layout in LAYOUTS:
        groups = nodes.get(layout, LAYOUTS[layout][1]).replace(':4"', ':2"')
        text = conf("fail_as_told.py", ["-1", "hang", *args], layout, more=more, nodes=groups)
        runs[layout] = vjob.submit(text)
    for run in runs.values():
        wait_ready(vjob, run, 12)
    return runs


def test_a_node_without_power_ends_the_job_and_is_named(vjob: Vjob, clean_lab: Lab) -> None:
    runs = start_together(vjob)
    clean_lab.crash_node("a2")
    for run in runs.values():
        record = vjob.wait_over(run, timeout_s=120)
        assert record["verdict"] != "COMPLETED"
        assert "a2" in record["message"], vjob.explain(run)
        assert record["outcome"]["culprit_node"] == "a2"


@pytest.mark.long
def test_the_first_node_without_power_is_named_though_it_judged_nothing(
    vjob: Vjob, clean_lab: Lab
) -> None:
    """The batch script died with its node: `vjob` judges from what the ranks left. In a split run
    the other half ends too."""
    runs = start_together(vjob, single="    - {group: all, count: 4, queue: gpu2, ranks: 3}")
    clean_lab.crash_node("b1")
    for layout, run in runs.items():
        record = vjob.wait_over(run, timeout_s=120)
        assert "b1" in record["message"], vjob.explain(run)
        assert layout == "split" or record["outcome"]["culprit_node"] == "b1", vjob.explain(run)


@pytest.mark.parametrize("layout", usually("single", "split"))
def test_cancel_asks_for_a_checkpoint_and_every_rank_hears(vjob: Vjob, layout: str) -> None:
    run = vjob.submit(conf("fail_as_told.py", ["-1", "hang", "catch", "child"], layout))
    count = 12 if layout == "single" else 16
    wait_ready(vjob, run, count)
    assert "left after it was asked to save" in vjob("cancel", "last").stdout
    assert read_out(run).count("got SIGUSR1") == count, "once each"
    assert read_out(run).count("child lives") == count


def wait_for_words(vjob: Vjob, run: RunFolder, words: str, count: int) -> None:
    wait_for(lambda: read_out(run).count(words) == count, 100, lambda: vjob.explain(run))


def test_the_warning_before_the_time_limit_reaches_every_rank_once(vjob: Vjob) -> None:
    """The limit is 5 minutes away. Slurm 22.05 sends a warning once, and up to half a minute early:
    if it were due when the job starts, it might come before the job's script runs."""
    more = "  signal_before_end_s: 260"
    runs = start_together(vjob, "signals", "child", more=more)
    for run in runs.values():
        wait_for_words(vjob, run, "child lives", 12)
        assert read_out(run).count("got SIGUSR1") == 12
        vjob("cancel", run.name, "--now")


def test_cancel_now_ends_a_het_job_whole(vjob: Vjob, clean_lab: Lab) -> None:
    run = vjob.submit(conf("fail_as_told.py", ["-1", "hang"], "hetjob"))
    wait_ready(vjob, run, 16)
    job = vjob.status("last")["scheduler"]["jobs"]
    assert [row["id"].partition("+")[2] for row in job] == ["0", "1"]
    assert vjob.status(job[1]["id"])["run"] == run.name, "a component's id finds the run"
    vjob("cancel", job[0]["id"], "--now")
    record = vjob.wait_over(run)
    assert record["verdict"] == "CANCELLED"
    assert record["outcome"]["culprit_rank"] is None


def test_a_requeued_job_starts_a_new_attempt_with_its_own_files(vjob: Vjob, clean_lab: Lab) -> None:
    run = vjob.submit(conf("fail_as_told.py", ["-1", "hang"], requeue=True, nodes=TWO_NODES))
    wait_ready(vjob, run, 4)
    job = read_job(run)
    clean_lab.run(["scontrol", "requeue", job])
    wait_ready(vjob, run, 4, attempt=1)
    assert read_out(run, 1).count("attempt 1") == 4
    first = json.loads(run.attempt(0).master.read_text())
    again = json.loads(run.attempt(1).master.read_text())
    assert (first["attempt"], again["attempt"]) == (0, 1)
    assert first["port"] != again["port"]
    vjob("cancel", "last", "--now")


def read_job(run: RunFolder) -> str:
    record = read_record(run)
    assert record is not None
    return record.jobs[0].id


@pytest.mark.parametrize(
    ("count", "reason", "has_time"),
    [(3, "PartitionNodeLimit", False), (60, "PartitionConfig", True)],
)
def test_a_job_that_can_never_run_is_told_at_once_with_the_remedy(
    vjob: Vjob, count: int, reason: str, has_time: bool
) -> None:
    """sbatch accepts it (EnforcePartLimits is off), and it would pend for ever. Slurm says
    PartitionConfig first, and then PartitionNodeLimit if the cluster has so many nodes."""
    nodes = f"    - {{group: many, count: {count}, queue: gpu1}}"
    said = vjob("submit", vjob.write(conf(nodes=nodes)))
    assert f"will not start: {reason}" in said.stderr and "lower count" in said.stderr
    assert ("walltime_min" in said.stderr) is has_time
    assert "`vjob cancel " in said.stderr
    assert "lower count" in vjob("status", "last", code=12).stdout
    vjob("cancel", "last")
    assert vjob.status("last")["state"] == "CANCELLED"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("queue: nowhere, count: 1", "sinfo"),
        ('queue: gpu1, count: 1, gpus: "h100:8"', "gpus"),
    ],
)
def test_sbatchs_refusal_comes_with_a_remedy(vjob: Vjob, change: str, word: str) -> None:
    nodes = f"    - {{group: m, {change}}}"
    assert word in vjob("submit", vjob.write(conf(nodes=nodes)), code=1).stderr


def test_a_refused_second_half_takes_back_the_first(vjob: Vjob, clean_lab: Lab) -> None:
    nodes = "    - {group: m, count: 1, queue: gpu1}\n    - {group: s, count: 1, queue: nowhere}"
    vjob("submit", vjob.write(conf(layout="split", nodes=nodes)), code=1)
    wait_for(lambda: not clean_lab.run(["squeue", "-h"]).stdout.strip(), 30)


def test_a_pending_job_says_why(vjob: Vjob, clean_lab: Lab) -> None:
    clean_lab.crash_node("a1")
    nodes = "    - {group: m, count: 2, queue: gpu1}"
    run = vjob.submit(conf(nodes=nodes))
    wait_for(lambda: any(job["reason"] for job in vjob.status("last")["scheduler"]["jobs"]), 60)
    assert vjob.status("last")["state"] in ("PENDING", "RUNNING")
    vjob("cancel", run.name, "--now")


def test_without_accounting_a_run_is_followed_to_its_end(vjob: Vjob, clean_lab: Lab) -> None:
    with clean_lab.without_accounting():
        done = vjob.submit(conf(nodes=TWO_NODES))
        assert vjob.wait_over(done)["verdict"] == "COMPLETED"
        failed = vjob.submit(conf("fail_as_told.py", ["1", "exit:7"], nodes=TWO_NODES))
        assert vjob.wait_over(failed)["outcome"]["code"] == 7


def test_a_run_folder_that_vanished_is_said_and_not_a_silent_death(vjob: Vjob) -> None:
    """Up to 22.05 a job without its folder dies without a trace: 0:53, its script never runs."""
    run = vjob.submit(conf(nodes=TWO_NODES), "--set", "cluster.sbatch.begin=now+3600")
    assert vjob.status("last")["state"] == "PENDING"
    shutil.rmtree(run.path)
    said = vjob("status", "last", code=2).stderr
    assert f"the folder of run {run.name} was removed, but its job still exists: scancel " in said


def test_a_missing_log_folder_is_made_at_submit(vjob: Vjob) -> None:
    run = vjob.submit(conf(nodes=TWO_NODES) + "log_folder: not/yet/there\n")
    assert vjob.wait_over(run)["verdict"] == "COMPLETED"
    assert run.path.parent == vjob.folder / "not/yet/there"


def test_a_job_whose_submit_was_cut_off_is_adopted(vjob: Vjob) -> None:
    run = vjob.submit(conf("fail_as_told.py", ["-1", "hang"], nodes=TWO_NODES))
    record = read_record(run)
    assert record is not None
    write_record(run, replace(record, state="intent", jobs=()))
    assert vjob.status("last")["scheduler"]["jobs"][0]["id"] == record.jobs[0].id
    vjob("cancel", "last", "--now")


def test_ctrl_c_during_submit_loses_no_job(vjob: Vjob, clean_lab: Lab) -> None:
    """A slow sbatch, interrupted: the job is in the record afterwards."""
    tools = vjob.folder / "bin"
    tools.mkdir()
    real = shutil.which("sbatch")
    (tools / "sbatch").write_text(
        f'#!/bin/sh\ntouch "{vjob.folder}/called"\nsleep 2\nexec {real} "$@"\n'
    )
    (tools / "sbatch").chmod(0o755)
    vjob.env["PATH"] = f"{tools}:{vjob.env['PATH']}"
    name = vjob.write(conf("fail_as_told.py", ["-1", "hang"], nodes=TWO_NODES))
    child = vjob.start("submit", name)
    wait_for((vjob.folder / "called").exists, 30)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=60) == 130
    assert vjob.status("last")["scheduler"]["jobs"], "the job is known"
    vjob("cancel", "last", "--now")


def test_with_the_controller_down_nothing_is_lost_and_the_message_helps(
    vjob: Vjob, clean_lab: Lab
) -> None:
    run = vjob.submit(conf("fail_as_told.py", ["-1", "hang"], nodes=TWO_NODES))
    wait_ready(vjob, run, 4)
    clean_lab.stop_controller()
    try:
        said = vjob("submit", vjob.write(conf(nodes=TWO_NODES)), code=1).stderr
        assert "scontrol ping" in said
        assert vjob.status(run.name)["state"] in ("RUNNING", "UNKNOWN"), "nobody says it ended"
    finally:
        clean_lab.start_controller()
    wait_for(lambda: vjob.status(run.name)["state"] == "RUNNING", 60)
    vjob("cancel", run.name, "--now")


def test_slurm_tells_when_it_would_start(vjob: Vjob) -> None:
    for layout in LAYOUTS:
        said = vjob("submit", vjob.write(conf(layout=layout)), "--test-only").stdout
        assert "to start at" in said
    assert not (vjob.folder / "log").exists()


def test_doctor_knows_the_lab(vjob: Vjob) -> None:
    rows: list[dict[str, Any]] = json.loads(vjob("doctor", "--json", code=None).stdout)
    found = {row["name"]: row["status"] for row in rows}
    assert found["slurm version"] == "ok" and found["accounting"] == "ok"
    assert found["het jobs"] == "ok"


def test_a_gpu_that_is_missing_is_said_before_any_rank_starts(vjob: Vjob) -> None:
    nodes = '    - {group: m, count: 2, queue: gpu2, gpus: "a10:2", devices: [0, 1], ranks: 2}'
    run = vjob.submit(conf(nodes=nodes))
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    rows = [json.loads(line) for line in read_out(run).splitlines()]
    assert {row["gpus"] for row in rows} == {"0,1"}


def test_a_taken_port_is_passed_over(vjob: Vjob, clean_lab: Lab) -> None:
    """Two runs at once on the same nodes get two ports."""
    nodes = "    - {group: pair, count: 2, queue: gpu2, ranks: 1, cpus: 2}"
    runs = [vjob.submit(conf("fail_as_told.py", ["-1", "hang"], nodes=nodes)) for _ in range(2)]
    for run in runs:
        wait_ready(vjob, run, 2)
    ports = {json.loads(run.attempt(0).master.read_text())["port"] for run in runs}
    assert len(ports) == 2 and all(port >= 61000 for port in ports)
    for run in runs:
        vjob("cancel", run.name, "--now")
    assert os.path.exists(runs[0].path)

"""Variables of Slurm that ranks see, beside those of a real srun with one task a rank."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cluster.lab import Lab
from tests.command import Vjob

pytestmark = pytest.mark.slurm

DUMP = """
import json, os, sys
found = {name: value for name, value in os.environ.items() if name.startswith(("SLURM", "PMI"))}
with open(f"{sys.argv[1]}.{os.environ['SLURM_PROCID']}", "w") as file:
    json.dump(found, file)
"""
OWN_TO_SRUN = re.compile(
    r"\w+_(HET|PACK)_GROUP_\d+$|SLURM_(HET|PACK)_SIZE$"  # all nodes look like one job
    r"|SLURM_(GTIDS|TASK_PID|CPU_BIND\w*)$"  # of the task, and ours is the agent
    r"|SLURM_(SRUN_COMM_\w+|STEP_LAUNCHER_PORT)$"  # by which a task talks to its srun
    r"|SLURM_(DISTRIBUTION|EXPORT_ENV|GET_USER_ENV|PRIO_PROCESS|UMASK|NODE_ALIASES)$"  # its options
    r"|SLURM_JOB_CPUS_PER_NODE$"  # a list in srun's order of nodes, and the agents' processors
)
"""Variables that srun sets and we do not."""
OWN_TO_US = {"SLURM_NTASKS_PER_NODE"}
"""Lightning asks for it; srun sets it only where it was an option."""
OF_EACH_JOB = re.compile(
    r"SLURM_(JOB_?ID|JOB_NAME|STEP_?ID|SUBMIT_DIR|WORKING_CLUSTER|MEM_PER_\w+|CPUS_ON_NODE)$"
)
"""Values that differ between two jobs, and what they asked for."""

PLAIN = (
    "#SBATCH -p gpu2 -N2 --ntasks-per-node=2\nsrun ",
    "nodes: [{group: a, queue: gpu2, count: 2, ranks: 2}]",
)
HET = (
    "#SBATCH -p gpu2 -N1 -n2\n#SBATCH hetjob\n#SBATCH -p gpu1 -N2 -n2\nsrun --het-group=0,1 ",
    "hetero: hetjob, nodes: [{group: b, queue: gpu2, count: 1, ranks: 2},"
    " {group: a, queue: gpu1, count: 2, ranks: 1}]",
)


@pytest.mark.parametrize("kind", ["plain", "het"])
def test_ranks_see_what_srun_with_a_task_a_rank_sets(
    clean_lab: Lab, tmp_path: Path, kind: str
) -> None:
    job, nodes = {"plain": PLAIN, "het": HET}[kind]
    (tmp_path / "dump.py").write_text(DUMP)
    command = f"{job}{sys.executable} {tmp_path}/dump.py {tmp_path}/theirs\n"
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n{command}")
    clean_lab.run(
        ["sbatch", "--wait", "--export=NONE", f"--output={tmp_path}/out", f"{tmp_path}/job.sh"]
    )
    vjob = Vjob(tmp_path, clean_lab.env)
    program = f"program: {{script: dump.py, args: [{tmp_path}/ours]}}\n"
    run = vjob.submit(
        f"name: world\n{program}cluster: {{scheduler: slurm, walltime_min: 5, {nodes}}}\n"
    )
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    for rank in range(4):
        theirs = json.loads((tmp_path / f"theirs.{rank}").read_text())
        ours = json.loads((tmp_path / f"ours.{rank}").read_text())
        assert {name for name in theirs if not OWN_TO_SRUN.match(name)} == {
            name for name in ours if name not in OWN_TO_US or name in theirs
        }
        differ = {name for name in ours if name in theirs and ours[name] != theirs[name]}
        differ = {name for name in differ if not OF_EACH_JOB.match(name)}
        assert ours["SLURM_JOB_ID"] == ours["SLURM_JOBID"] and ours["SLURM_JOB_ID"].isdigit()
        if kind == "plain":
            assert not differ
            continue
        # srun sorts the nodes by name, and with them the numbers of tasks; rank 0's is first here.
        names = {"SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"}
        counts = {"SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"}
        # In a het job's step srun gives all tasks the queue of whichever component it started last.
        assert differ - {"SLURM_JOB_PARTITION"} == names | counts
        assert {ours[name] for name in names} == {"b1,a[1-2]"}
        assert {theirs[name] for name in names} == {"a[1-2],b1"}
        assert {ours[name] for name in counts} == {"2,1(x2)"}

"""What a rank is told of its place: as torchrun tells it, and as srun does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import make_container, make_group, make_plan
from varuna_core.agent.setup.ranks import Meeting, build_rank
from varuna_core.agent.setup.world import (
    LAUNCHES,
    TORCHRUN,
    Place,
    Rendezvous,
    build_world,
    find_job_id,
    leave_agent,
    place_rank,
)

MEETING = Rendezvous(
    address="10.0.0.1", port=6000, run_id="demo-1", attempt=2, restarts=3, error_file="/run/0.json"
)
UNDER_SLURM = replace(MEETING, job_id="7")
DIFFERENT_FROM_TORCHRUN = {
    "MASTER_ADDR": "ours is an address that other nodes reach, on one node too",
    "MASTER_PORT": "picked by each",
    "TORCHELASTIC_RUN_ID": "the run's own name",
    "TORCHELASTIC_USE_AGENT_STORE": "rank 0 holds the store, not the agent",
    "TORCHELASTIC_ERROR_FILE": "in the run folder",
    "NODE_RANK": "only ours: what torchrun calls GROUP_RANK",
    "OMP_NUM_THREADS": "the processors that the conf asked for, divided",
}
DUMP = """
import json, os
names = ("RANK", "WORLD", "MASTER", "TORCH", "ROLE", "OMP")
found = {name: value for name, value in os.environ.items() if any(n in name for n in names)}
json.dump(found, open(f"{os.environ['RANK']}.json", "w"))
"""


@pytest.mark.slow
def test_ranks_are_told_what_torchrun_tells_them(tmp_path: Path) -> None:
    (tmp_path / "dump.py").write_text(DUMP)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "dump.py"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    subprocess.run([sys.executable, *words], cwd=tmp_path, env=kept, check=True)
    plan = make_plan(make_group("a", 1, 2, cpus=2))
    meeting = Meeting(tmp_path, 0, tmp_path, "10.0.0.1", 6000, None, "n0")
    for rank in (0, 1):
        theirs = json.loads((tmp_path / f"{rank}.json").read_text())
        env = build_rank(plan, plan.node(0), rank, meeting, kept, None).env
        ours = {n: v for n, v in env.items() if not n.startswith("VJOB_") and n not in kept}
        del ours["PYTHONUNBUFFERED"]
        assert theirs.keys() | {"NODE_RANK"} == ours.keys()
        differ = {name for name in ours if ours[name] != theirs.get(name)}
        assert differ <= DIFFERENT_FROM_TORCHRUN.keys()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_only_torchruns_ranks_have_its_defaults(launch: str) -> None:
    plan = make_plan(make_group("a", 1, 1), launch=launch)
    meeting = Meeting(Path("/run"), 0, Path("/run"), "10.0.0.1", 6000, None, "n0")
    for container in (None, make_container()):
        start = build_rank(plan, plan.node(0), 0, meeting, {"PATH": "/bin"}, container)
        told = {*start.env, *start.entering}
        assert ("TORCH_NCCL_ASYNC_ERROR_HANDLING" in told) is (launch == TORCHRUN)


def test_a_variable_may_refer_to_the_address_of_rank_0() -> None:
    group = make_group("a", 1, 1, env={"AT": "tcp://\0master.address\0:\0master.port\0"})
    plan = make_plan(group, env={"NODE": "\0node.rank\0 of \0node.count\0"})
    meeting = Meeting(Path("/run"), 0, Path("/run"), "10.0.0.1", 6000, None, "n0")
    for container in (None, make_container()):
        env = build_rank(plan, plan.node(0), 0, meeting, {"PATH": "/bin"}, container).env
        assert "tcp://10.0.0.1:6000" in str(env) and "0 of 1" in str(env)


def test_what_slurm_says_enters_a_container() -> None:
    plan = make_plan(make_group("a", 1, 2), scheduler="slurm")
    meeting = Meeting(Path("/run"), 0, Path("/run"), "10.0.0.1", 6000, None, "n0", "7", ("n0",))
    own = {"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "demo", "SLURM_GTIDS": "0"}
    entering = build_rank(plan, plan.node(0), 1, meeting, own, make_container()).entering
    assert {"SLURM_PROCID", "SLURM_JOB_ID", "SLURM_NODELIST", "SLURM_JOB_NAME"} <= {*entering}
    assert "SLURM_GTIDS" not in entering and "TORCHELASTIC_ERROR_FILE" in entering


UNEVEN = make_plan(make_group("a", 1, 1), make_group("b", 2, 2, cpus=8))
HOSTS = ("b9", "b10", "a1")


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        (
            place_rank(UNEVEN, UNEVEN.node(2), 1, HOSTS),
            "PROCID=4 LOCALID=1 NODEID=2 NTASKS=5 NPROCS=5 STEP_NUM_TASKS=5 NNODES=3 "
            "JOB_NUM_NODES=3 STEP_NUM_NODES=3 TASKS_PER_NODE=1,2(x2) STEP_TASKS_PER_NODE=1,2(x2) "
            "NODELIST=b[9-10],a1 JOB_NODELIST=b[9-10],a1 STEP_NODELIST=b[9-10],a1",
        ),
        (
            Place(1, 0, 1, (1,) * 3, HOSTS[:2]),
            "PROCID=1 LOCALID=0 NODEID=1 NTASKS=3 NPROCS=3 STEP_NUM_TASKS=3 NNODES=3 "
            "JOB_NUM_NODES=3 STEP_NUM_NODES=3 TASKS_PER_NODE=1(x3) STEP_TASKS_PER_NODE=1(x3) "
            "NTASKS_PER_NODE=1 NODELIST=b[9-10] JOB_NODELIST=b[9-10] STEP_NODELIST=b[9-10]",
        ),
        (
            Place(0, 0, 0, (1,)),
            "PROCID=0 LOCALID=0 NODEID=0 NTASKS=1 NPROCS=1 STEP_NUM_TASKS=1 NNODES=1 "
            "JOB_NUM_NODES=1 STEP_NUM_NODES=1 TASKS_PER_NODE=1 STEP_TASKS_PER_NODE=1 "
            "NTASKS_PER_NODE=1",
        ),
    ],
)
def test_slurm_is_true_for_each_rank(place: Place, wanted: str) -> None:
    given = "JOB_ID=7 JOBID=7 LAUNCH_NODE_IPADDR=10.0.0.1 " + wanted
    found = build_world("srun", place, UNDER_SLURM)
    assert found == {f"SLURM_{name}": value for name, _, value in _split(given)}


def _split(text: str) -> list[tuple[str, str, str]]:
    return [word.partition("=") for word in text.split()]


@pytest.mark.parametrize("ranks", [2, 16])
def test_a_task_has_its_share_of_the_processors(ranks: int) -> None:
    place = Place(0, 0, 0, (ranks,))
    found = build_world("srun", place, replace(UNDER_SLURM, cpus=8))
    assert found["SLURM_CPUS_PER_TASK"] == {2: "4", 16: "1"}[ranks]


def test_each_launch_tells_its_own() -> None:
    told = {launch: build_world(launch, Place(1, 1, 0, (2,)), MEETING) for launch in LAUNCHES}
    assert not told["srun"] and not told["python"]
    assert told["node"] == {"NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "6000"}
    assert told["node"].items() < told[TORCHRUN].items()
    assert told[TORCHRUN]["TORCHELASTIC_RESTART_COUNT"] == "2"


@pytest.mark.parametrize(
    ("scheduler", "number", "first", "found"),
    [
        ("slurm", "9", "7", "7"),  # of a split run, or nodes that joined
        ("slurm", "9", "7_3", "9"),
        ("slurm", "9", None, "9"),
        ("slurm", None, "7", None),
        ("local", "L9", "L9", None),
        ("ssh", "L9", "L9", None),
        ("toy", "9", "9", None),
    ],
)
def test_all_ranks_have_one_job(
    scheduler: str, number: str | None, first: str | None, found: str | None
) -> None:
    own = {} if number is None else {"SLURM_JOB_ID": number}
    assert find_job_id(scheduler, own, first) == found


OF_TASK = [
    "SLURM_PROCID", "SLURM_GTIDS", "SLURM_SRUN_COMM_HOST", "SLURM_HET_SIZE", "SLURM_CPU_BIND",
    "SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_TASKS_PER_NODE", "SLURM_JWT", "PMI_RANK", "PMIX_RANK",
    "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
]  # fmt: skip
OF_JOB = ["SLURM_JOB_NAME", "SLURM_SUBMIT_DIR", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT",
          "SLURM_STEP_ID", "SLURMD_NODENAME", "SLURM_JOB_END_TIME"]  # fmt: skip
OF_USER = ["OMPI_MCA_btl", "SLURM_CONF", "HYDRA_FULL_ERROR", "NCCL_DEBUG", "MASTER", "RANKS"]


@pytest.mark.parametrize("under_slurm", [True, False])
def test_what_tells_of_the_agents_own_task_ends_with_it(under_slurm: bool) -> None:
    own = dict.fromkeys([*OF_TASK, *OF_JOB, *OF_USER], "x")
    own["PATH"] = "/run/local-bin.L3:/usr/bin:/bin"
    left = leave_agent(own, "/run", under_slurm=under_slurm)
    assert left.pop("PATH") == "/usr/bin:/bin"
    assert sorted(left) == sorted([*OF_USER, *(OF_JOB if under_slurm else [])])

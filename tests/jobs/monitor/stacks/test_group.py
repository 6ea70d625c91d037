"""`vjob stacks`: equal stacks together, the odd ones first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.agent.stacks import Unpacker, explain_refusal, pack, shorten_error
from varuna_core.records.formatting import join_numbers
from vjob.jobs.monitor.stacks.collect import build_for_jobs
from vjob.jobs.monitor.stacks.group import (
    Frame,
    RankStack,
    Stacks,
    Thread,
    group_stacks,
    parse_rank,
    render_stacks,
    shorten_path,
)
from vjob.jobs.schedulers.job import JobState, SchedulerJob
from vjob.jobs.schedulers.node_names import expand_nodes
from vjob.jobs.schedulers.slurm.commands import build_beside_command
from vjob.jobs.schedulers.slurm.scheduler import SlurmScheduler

FRAMES = st.builds(
    Frame,
    function=st.sampled_from(["wait", "step", "main"]),
    file=st.sampled_from(["a.py", "b.py"]),
    line=st.integers(1, 3),
)
THREADS = st.builds(
    Thread, name=st.just("MainThread"), frames=st.lists(FRAMES, min_size=1, max_size=3).map(tuple)
)
STACKS = st.lists(
    st.builds(
        RankStack,
        rank=st.integers(0, 40),
        node=st.sampled_from(["n0", "n1"]),
        state=st.sampled_from(["S", "R", "T"]),
        threads=st.tuples(THREADS, THREADS),
    ),
    unique_by=lambda stack: stack.rank,
    max_size=20,
)


def places(stack: RankStack, count: int) -> Any:
    return [[frame.place for frame in thread.frames] for thread in stack.threads[:count]]


@given(STACKS, st.booleans())
def test_groups_hold_each_rank_once_and_only_equals(stacks: list[RankStack], whole: bool) -> None:
    groups = group_stacks(stacks, whole=whole)
    assert sorted(rank for group in groups for rank in group.ranks) == sorted(
        stack.rank for stack in stacks
    )
    sizes = [len(group.stacks) for group in groups]
    assert sizes == sorted(sizes)
    seen = []
    for group in groups:
        keys = [(places(stack, 2 if whole else 1), stack.state == "T") for stack in group.stacks]
        assert all(key == keys[0] for key in keys)
        assert keys[0] not in seen, "two groups with the same stack"
        seen.append(keys[0])
        assert group.ranks == sorted(group.ranks)


@given(st.permutations(range(12)), STACKS)
def test_the_order_of_answers_does_not_matter(order: list[int], stacks: list[RankStack]) -> None:
    shuffled = [stacks[at] for at in order if at < len(stacks)]
    assert group_stacks(shuffled) == group_stacks(stacks[:12])


@given(st.sets(st.integers(0, 60)))
def test_numbers_are_spelt_so_that_they_come_back(numbers: set[int]) -> None:
    found: list[int] = []
    for part in filter(None, join_numbers(numbers).split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert found == sorted(numbers)
    assert join_numbers([9, 3, 8, 7]) == "3,7-9"


@given(st.text(max_size=300), st.binary(max_size=50))
def test_whatever_pyspy_says_of_a_rank_is_read(text: str, junk: bytes) -> None:
    frame = {"name": text, "filename": None, "line": None}
    threads = [{"frames": None}, text, None, {"os_thread_id": 7, "frames": [frame]}]
    stack = parse_rank({"rank": 1, "threads": threads})
    assert len(stack.threads) == 1 and not stack.problem
    assert "\x1b" not in stack.threads[0].frames[0].function
    assert parse_rank({"rank": 1, "threads": []}).problem == "py-spy saw no Python in the process"


@pytest.mark.parametrize("name", ["MainThread", None])
def test_the_main_thread_comes_first_by_name_or_age(name: str | None) -> None:
    """In a container a thread's number is its own there, and the process' pid is the node's."""
    frame = {"name": "f", "filename": "a.py", "line": 1}
    others = [{"pid": 90, "os_thread_id": n, "thread_name": "w", "frames": [frame]} for n in (3, 2)]
    main = {"pid": 90, "os_thread_id": 1, "thread_name": name, "frames": [{**frame, "name": "m"}]}
    stack = parse_rank({"rank": 1, "threads": [*others, main]})
    assert stack.threads[0].frames[0].function == "m" and len(stack.threads) == 3


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=2000), lambda inner: st.lists(inner, max_size=4)
)


@given(st.lists(VALUES, max_size=5), st.randoms())
def test_parcels_come_back_from_a_channel_that_mixes_lines(values: list[Any], random: Any) -> None:
    queues = [list(pack(str(key), [key, value])) for key, value in enumerate(values)]
    queues.append(["srun: error: something else", "vjob-parcel torn", ""])
    unpacker, found = Unpacker(), []
    while queues := [queue for queue in queues if queue]:
        line = random.choice(queues).pop(0)
        assert len(line) < 1000
        _, value = unpacker.add(line)
        found += [value] if value is not None else []
    assert sorted(found, key=lambda item: int(item[0])) == [
        [key, value] for key, value in enumerate(values)
    ]


def test_a_damaged_parcel_is_dropped() -> None:
    unpacker = Unpacker()
    assert unpacker.add("vjob-parcel a 1/1 AAAA") == (True, None)
    assert unpacker.add("vjob-parcel b 1/1 A") == (True, None)
    assert unpacker.add("3: " + next(iter(pack("c", {"d": 1})))) == (True, {"d": 1})


def make_stack(rank: int, function: str, line: int = 1, **changes: Any) -> RankStack:
    frames = (
        Frame(function=function, file="/opt/lib/site-packages/torch/wait.py", line=line),
        Frame(function="main", file="/home/me/work/train.py", line=60),
    )
    node = f"n{rank // 4}"
    threads = (Thread(name="MainThread", frames=frames),)
    return RankStack(rank=rank, node=node, threads=threads, **changes)


def test_the_odd_rank_comes_first_and_the_others_in_one_line() -> None:
    stacks = [make_stack(rank, "recv", 30 + (rank == 5)) for rank in range(8) if rank not in (3, 6)]
    stacks.append(make_stack(3, "open"))
    failed = (RankStack(rank=6, node="n1", state="D", problem="no answer within 15 s"),)
    found = Stacks(
        run="r", world=9, groups=tuple(group_stacks(stacks)), failed=failed, silent={"n2": "gone"}
    )
    assert (
        render_stacks(found)
        == """\
7 of 9 ranks, 2 different stacks, the fewest ranks first

rank 3 on n0
  open (torch/wait.py:1)
  main (work/train.py:60)

ranks 0-2,4-5,7 on n0, n1
  recv (torch/wait.py:31 (5), 30 (0-2,4,7))
  main (work/train.py:60)

not seen: rank 6 on n1 (waits for a disk): no answer within 15 s
no answer: n2: gone"""
    )
    shown = found.as_json()
    assert (shown["groups"][0]["ranks"], shown["groups"][0]["nodes"]) == ([3], ["n0"])
    assert shown["silent_nodes"] == {"n2": "gone"}
    assert json.dumps(shown)
    unseen = render_stacks(replace(found, groups=(), failed=()))
    assert unseen == "no stack of the 9 ranks could be read\n\nno answer: n2: gone"
    hung = replace(found, hang="rank 3 did not come", queues=("rank 3 has not read 9 bytes",))
    assert render_stacks(hung).splitlines()[:3] == [
        "rank 3 did not come",
        "rank 3 has not read 9 bytes",
        "7 of 9 ranks, 2 different stacks, the fewest ranks first",
    ]


def test_native_functions_without_a_name_are_equal_wherever_they_were_loaded() -> None:
    stacks = [make_stack(rank, f"0x7f94e8a3b2{rank}a", 0) for rank in range(3)]
    (group,) = group_stacks(stacks)
    assert group.ranks == [0, 1, 2]
    text = render_stacks(Stacks(run="r", world=3, groups=(group,), failed=(), silent={}))
    assert "  0x7f94e8a3b20a (torch/wait.py)\n" in text


def test_a_stopped_rank_stands_apart_from_those_at_the_same_place() -> None:
    stacks = [make_stack(rank, "recv", state="T" if rank == 2 else "S") for rank in range(4)]
    groups = group_stacks(stacks)
    assert [group.ranks for group in groups] == [[2], [0, 1, 3]]
    assert "rank 2 on n0, stopped" in render_stacks(
        Stacks(run="r", world=4, groups=tuple(groups), failed=(), silent={})
    )


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/v/lib/python3.11/site-packages/torch/a/b.py", "torch/a/b.py"),
        ("/home/me/train.py", "me/train.py"),
        ("train.py", "train.py"),
        ("<frozen runpy>", "<frozen runpy>"),
    ],
)
def test_paths_are_short(path: str, shown: str) -> None:
    assert shorten_path(path) == shown


SPY_ERROR = """Error: Failed to suspend process
Reason: EPERM: Operation not permitted

Caused by:
    0: Permission denied (os error 13)

Stack backtrace:
   0: <E as anyhow::context::ext::StdError>::ext_context
"""


def test_what_pyspy_complains_of_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = shorten_error(SPY_ERROR)
    assert said.startswith("Failed to suspend process: EPERM: Operation not permitted")
    assert "anyhow" not in said
    scope = tmp_path / "ptrace_scope"
    monkeypatch.setattr("varuna_core.agent.stacks.YAMA", scope)
    assert "try as root" in explain_refusal(said)
    scope.write_text("1\n")
    assert "kernel.yama.ptrace_scope is 1" in explain_refusal(said)
    assert explain_refusal("Failed to find python version") == ""


def test_the_step_beside_takes_nothing_and_reaches_all_components() -> None:
    one = build_beside_command("12", [(None, 4)], "all", ["agent"])
    assert one[:2] == ["srun", "--jobid=12"] and "--overlap" in one
    assert one[-3:] == ["--nodes=4", "--ntasks=4", "agent"]
    het = build_beside_command("12", [(0, 4), (1, 2)], "weak", ["agent"])
    first, second = het[: het.index(":")], het[het.index(":") + 1 :]
    assert "--het-group=0" in first and "--nodes=4" in first and first[-1] == "agent"
    assert "--het-group=1" in second and "--nodes=2" in second and second[-1] == "agent"


def test_of_a_run_that_morphs_each_job_is_asked_on_the_nodes_that_take_part() -> None:
    def make_info(job: str, nodes: str) -> SchedulerJob:
        return SchedulerJob(
            id=job, state=JobState.RUNNING, native_word="RUNNING", nodes=tuple(expand_nodes(nodes))
        )

    jobs = [("12+0", "a1"), ("12+1", "b[1-3]"), ("15", "b[4-5]"), ("16", "")]
    infos = [make_info(job, nodes) for job, nodes in jobs]
    found = list(
        build_for_jobs(SlurmScheduler().build_beside, infos, ["agent"], {"a1", "b2", "b3", "b5"})
    )
    kinds = ("--jobid", "--het", "--nodel")
    asked = [[word for word in words if word.startswith(kinds)] for words in found]
    assert asked == [
        ["--jobid=12", "--het-group=0", "--nodelist=a1"],
        ["--jobid=12", "--het-group=1", "--nodelist=b2,b3"],
        ["--jobid=15", "--nodelist=b5"],
    ]
    assert "--nodes=2" in found[1] and all("--export=ALL,VJOB_GROUP=" in words for words in found)

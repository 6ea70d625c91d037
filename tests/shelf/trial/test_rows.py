"""Slurm's words about a run that is only asked about, and where ranks wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vjob.jobs.monitor.stacks.group import Frame, RankStack, Stacks, Thread, group_stacks
from vjob.jobs.schedulers.slurm.scheduler import refuse
from vjob.shelf.trial.result import Result, Row, Trouble, render
from vjob.shelf.trial.rows import build_refusal, find_step_s, format_bytes
from vjob.shelf.trial.watch import judge_stacks

REFUSED = "sbatch: error: Batch job submission failed: Invalid partition name specified"


def test_a_refusal_is_a_cause_and_a_remedy() -> None:
    found = build_refusal(refuse(REFUSED).with_note("\n  The scripts are in log/x"))
    assert found.cause.endswith("Invalid partition name specified")
    assert "sbatch refused" in found.cause and "cluster.nodes[].queue" in found.remedy


def test_the_time_of_the_first_steps_is_called_an_upper_bound() -> None:
    """Two warm-up steps took 127 ms, those of the run 24 ms, and both were called measured."""
    seen: Any = SimpleNamespace(step_times=[0.2, 0.127])
    trial: Any = SimpleNamespace(is_whole=True, is_small=False)
    assert find_step_s(trial, seen) == (0.127, "measured: first steps, so at most")
    part: Any = SimpleNamespace(is_whole=False, is_small=False, caveat="on one node")
    assert find_step_s(part, seen)[1] == "measured on one node: first steps, so at most"
    small: Any = SimpleNamespace(is_whole=False, is_small=True)
    assert find_step_s(small, seen)[0] is None


def stacks(*calls: tuple[str, ...]) -> Stacks:
    ranks = [
        RankStack(rank=rank, node="n", threads=(Thread(name="MainThread", frames=_frames(names)),))
        for rank, names in enumerate(calls)
    ]
    return Stacks(
        run="r", world=len(ranks), groups=tuple(group_stacks(ranks)), failed=(), silent={}
    )


def _frames(names: tuple[str, ...]) -> tuple[Frame, ...]:
    *inner, own = names
    library = "/usr/lib/python3/dist-packages/torch/distributed.py"
    frames = [Frame(function=name, file=library, line=1) for name in inner]
    return (*frames, Frame(function=own, file="/home/me/train.py", line=14))


def test_ranks_that_all_wait_hang_where_their_own_code_called() -> None:
    hang, at = judge_stacks(
        stacks(("wait", "barrier", "wrapper", "main"), ("wait", "barrier", "wrapper", "main")),
        frozenset(),
    )
    assert (hang, at) == ("ranks 0-1 are in barrier, called at train.py:14", "")


def test_a_method_is_known_by_its_own_name() -> None:
    hang, at = judge_stacks(
        stacks(("socket.accept", "main"), ("SocketIO.readinto", "main")), frozenset()
    )
    assert at == "" and "rank 0 is in accept, called at train.py:14" in hang
    assert "rank 1 is in readinto, called" in hang


def test_one_rank_at_work_is_no_hang() -> None:
    hang, at = judge_stacks(stacks(("barrier", "main"), ("matmul", "main")), frozenset({0}))
    assert hang == "" and "rank 1 is in matmul" in at


def test_ranks_without_a_processor_hang_whatever_they_call() -> None:
    hang, _ = judge_stacks(stacks(("mystery", "main")), frozenset({0}))
    assert hang == "rank 0 is in mystery, called at train.py:14"


def test_the_table_fits_80_columns_and_has_what_was_found_first() -> None:
    result = Result(
        conf="/x/conf.yaml",
        rows=(Row(name="step", text="1.2 s " * 30, certainty="measured", values={}),),
        findings=(Trouble(what="starts", cause="it broke " * 20, remedy="mend it"),),
        differs=("one node",),
        took_s=1.0,
    )
    lines = render(result).splitlines()
    assert lines[0].startswith("FOUND      it broke")
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1] == "differs    one node"


def test_sizes_are_told_by_powers_of_1024() -> None:
    assert [format_bytes(n) for n in (2048, 3 * 2**20, 1.5 * 2**30)] == ["2 kB", "3 MB", "1.5 GB"]

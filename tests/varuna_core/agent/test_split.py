"""Split runs: a job for each group, and no srun that watches over all of them."""

import signal
from collections.abc import Callable

from tests.varuna_core.agent.local_run import Stage, make_group, make_plan, shell
from varuna_core.records.exits import NODE_LOST
from varuna_core.records.files import read_json
from varuna_core.records.plan import Plan

MakeStage = Callable[..., Stage]


def make_split(command: tuple[str, ...] = ("true",)) -> Plan:
    groups = (make_group("big", 1, 1), make_group("small", 1, 1))
    return make_plan(*groups, layout="split", command=command)


def open_both(stage: Stage) -> None:
    assert stage.open("--group", "small").returncode == 0
    assert not stage.attempt.master.exists(), "only the first group publishes"
    assert stage.open("--group", "big", "--job-id", "7").returncode == 0


def test_a_split_run_ends_well_though_one_group_is_slower(make_stage: MakeStage) -> None:
    program = 'while [ "$VJOB_GROUP" = small ] && [ ! -e "$VJOB_RUN/on" ]; do sleep 0.05; done'
    stage = make_stage(make_split(shell(program)))
    open_both(stage)
    stage.start_all()
    assert stage.nodes[0].wait(timeout=20) == 0
    assert read_json(stage.attempt.beat(0))["state"] == "done"
    (stage.run.path / "on").touch()
    assert stage.nodes[1].wait(timeout=20) == 0
    assert stage.call("close", "--status", "0", "--group", "small").stdout == "0\n"
    assert stage.close(0, "--group", "big").code == 0


def test_a_split_run_ends_when_another_group_falls_silent(make_stage: MakeStage) -> None:
    stage = make_stage(make_split(shell("echo on; exec sleep 60")))
    open_both(stage)
    stage.start_all()
    for node in ("n0", "n1"):
        stage.wait_for_log(node, "out", "on")
    stage.nodes[1].kill()
    assert stage.wait() == [143, -signal.SIGKILL]
    outcome = stage.close(143, "--group", "big")
    assert (outcome.code, outcome.culprit_node) == (NODE_LOST, "n1")
    assert "n1 was lost: no sign of life for 1.5 s" in outcome.reason


def test_a_group_whose_srun_failed_tells_the_others(make_stage: MakeStage) -> None:
    stage = make_stage(make_split())
    open_both(stage)
    agent = stage.start(0)
    assert stage.call("close", "--status", "5", "--group", "small").stdout == "5\n"
    assert agent.wait(timeout=20) == 143
    outcome = stage.close(143, "--group", "big")
    assert outcome.code == 5
    assert "the job of group small ended with 5" in outcome.reason


def test_a_rank_of_another_group_is_named_by_the_first(make_stage: MakeStage) -> None:
    stage = make_stage(make_split(shell('[ "$RANK" = 1 ] && exit 9; exec sleep 60')))
    open_both(stage)
    stage.start_all()
    assert stage.wait() == [143, 9]
    assert stage.call("close", "--status", "9", "--group", "small").stdout == "9\n"
    assert stage.close(143, "--group", "big").reason == "rank 1 on n1 exited 9"

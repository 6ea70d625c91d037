"""Which lines `vjob logs` is asked for, and whether there can be any."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.confs import HETJOB, make_conf, make_plan
from varuna_core.records.files import write_json
from varuna_core.records.plan import write_plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.log_lines.print_logs import MANY, LineFilter, check_nodes, check_ranks


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Of eight nodes and 32 ranks."""
    run = RunFolder(tmp_path / "r")
    run.path.mkdir()
    write_plan(run.plan, make_plan(make_conf(HETJOB)))
    run.attempt(0).make()
    return run


def report(run: RunFolder, *numbers: int) -> None:
    for number in numbers:
        write_json(run.attempt(0).node_report(number), {"host": f"n{number}"})


def check(run: RunFolder, *nodes: str, wait: bool) -> bool:
    return check_nodes(run, run.attempts(), LineFilter.make(nodes=nodes), wait=wait)


def test_a_rank_that_is_none_is_told_with_those_that_are(run: RunFolder) -> None:
    check_ranks(run, LineFilter.make(ranks=(0, 31)))
    with pytest.raises(InputError, match="r has no rank -1, 32; it has 0 to 31"):
        check_ranks(run, LineFilter.make(ranks=(-1, 5, 32)))


def test_a_follower_waits_for_a_name_until_all_nodes_have_reported(run: RunFolder) -> None:
    assert not check(run, "n7", wait=True)
    report(run, 0, 1)
    assert not check(run, "n7", wait=True)
    with pytest.raises(InputError, match="r has no node n7; so far it has n0, n1"):
        check(run, "n7", wait=False)
    report(run, *range(8))
    assert check(run, "n7", "n0", wait=True) and check(run, wait=True)
    with pytest.raises(InputError, match="r has no node n8; it has n0, n1, n2, n3, n4, n5, n6, n7"):
        check(run, "n7", "n8", wait=True)


def test_of_many_names_a_message_lists_some(run: RunFolder) -> None:
    asked = tuple(range(100, 100 + MANY + 3))
    with pytest.raises(InputError, match=f"no rank 100, .*, {99 + MANY} and 3 more; it has"):
        check_ranks(run, LineFilter.make(ranks=asked))


def test_without_a_plan_that_can_be_read_nothing_is_refused(run: RunFolder) -> None:
    """A colleague who was shown the run has no plan: it holds secrets."""
    run.plan.unlink()
    check_ranks(run, LineFilter.make(ranks=(99,)))
    assert check(run, "zz", wait=False)

"""The verdict on an attempt, from what its ranks left behind."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.varuna_core.agent.local_run import make_group, make_plan
from varuna_core.facts.cause import EndCause
from varuna_core.records import exits
from varuna_core.records.exits import (
    NODE_LOST,
    NOT_READY,
    NodeExits,
    Outcome,
    RankExit,
    find_exited,
    judge_exits,
    rank_exit,
    read_exception,
    read_exit,
    read_exits,
    read_outcome,
    read_reason,
    write_judgement,
    write_outcome,
)
from varuna_core.records.files import write_json
from varuna_core.records.requests import write_stop
from varuna_core.records.runfolder import AttemptFolder, RunFolder

PLAN = make_plan(make_group("a", 2, 2))
NAMES = {0: "n60", 1: "n61"}


def make_exit(rank: int, code: int = 0, **changes: Any) -> RankExit:
    value = rank_exit(rank, NAMES[rank // 2], code, stopped=False, started=1.0, ended=2.0, error="")
    return replace(value, **changes)


def judge(*found: RankExit, stop: dict[str, Any] | None = None) -> Outcome:
    return judge_exits(PLAN, {item.rank: item for item in found}, stop, NAMES, 9.0).outcome


def stopped(rank: int) -> RankExit:
    return make_exit(rank, -15, stopped=True)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    folder = RunFolder(tmp_path).attempt(0)
    folder.make()
    return folder


@pytest.mark.parametrize(
    ("returncode", "code", "signal"),
    [(0, 0, None), (9, 9, None), (-9, 137, "SIGKILL"), (-11, 139, "SIGSEGV"), (-63, 191, None)],
)
def test_codes_are_those_of_a_shell(returncode: int, code: int, signal: str | None) -> None:
    value = make_exit(0, returncode)
    assert value.code == code
    assert value.signal == (signal or ("signal 63" if returncode == -63 else None))


def test_all_zero_is_zero() -> None:
    outcome = judge(*(make_exit(rank) for rank in range(4)))
    assert (outcome.code, outcome.missing_ranks) == (0, [])


def test_the_first_to_fail_is_the_culprit() -> None:
    outcome = judge(
        make_exit(0, 1, ended=5.0, last_error="connection reset"),
        stopped(1),
        make_exit(2, -9, ended=4.0, last_error="out of memory"),
        stopped(3),
        stop={"kind": "rank", "code": 1, "reason": "rank 0"},
    )
    assert (outcome.code, outcome.culprit_rank, outcome.culprit_signal) == (137, 2, "SIGKILL")
    said = "; the last line that it wrote: out of memory"
    assert outcome.reason == f"rank 2 on n61 was ended by SIGKILL{said}"


def test_a_warning_of_torch_long_before_a_kill_is_not_quoted() -> None:
    """It stood in `list` and the report as if it were the cause."""
    said = "[W1130 01:10:30.081 socket.cpp:207] [c10d] The hostname cannot be retrieved. err=-3"
    outcome = judge(make_exit(2, -9, ended=4.0, last_error=said), stopped(1))
    assert outcome.reason == "rank 2 on n61 was ended by SIGKILL"


def test_a_node_that_left_nothing_was_lost() -> None:
    outcome = judge(make_exit(0), make_exit(1))
    assert (outcome.code, outcome.culprit_node) == (NODE_LOST, "n61")
    assert outcome.missing_ranks == [2, 3]


def test_one_rank_that_left_nothing_means_its_node() -> None:
    outcome = judge(*map(make_exit, (0, 1, 3)))
    assert (outcome.code, outcome.culprit_node) == (NODE_LOST, "n61")
    assert outcome.reason == "the agent on n61 exited without a message: rank 2 left no exit code"


def test_the_signal_that_follows_a_lost_node_does_not_hide_it() -> None:
    """srun sends SIGTERM to the other nodes when one is gone; they say so in stop.json."""
    said = {"kind": "signal", "code": 143, "reason": "SIGTERM from the scheduler"}
    assert judge(stopped(0), stopped(1), stop=said).code == NODE_LOST
    everyone = judge(*(stopped(rank) for rank in range(4)), stop=said)
    assert (everyone.code, everyone.reason) == (143, "SIGTERM from the scheduler")
    assert judge(stop=said).code == 143


@pytest.mark.parametrize("kind", ["cancel", "not-ready", "lost", "rank"])
def test_other_stops_speak_for_the_ranks_that_are_missing(kind: str) -> None:
    said = {"kind": kind, "code": NOT_READY, "reason": "so said", "node": "n60"}
    outcome = judge(stopped(0), stopped(1), stop=said)
    assert (outcome.code, outcome.reason, outcome.culprit_node) == (NOT_READY, "so said", "n60")


def test_a_failed_rank_counts_more_than_a_stop() -> None:
    said = {"kind": "cancel", "code": 143, "reason": "cancelled"}
    assert judge(make_exit(0, 9), stopped(1), stop=said).code == 9


def test_ranks_stopped_without_a_word_were_stopped_from_outside() -> None:
    assert judge(*(stopped(rank) for rank in range(4))).code == 143


def test_ranks_that_ended_well_after_they_were_asked_to_stop_are_done() -> None:
    outcome = judge(*(make_exit(rank, 0, stopped=True) for rank in range(4)))
    assert (outcome.code, outcome.reason) == (0, "all 4 ranks exited 0")


def test_exits_and_outcome_come_back(attempt: AttemptFolder) -> None:
    node = NodeExits(attempt, 0, 2)
    node.write(make_exit(1, 9, last_error="모델"))
    (attempt.exit(2)).write_text('{"rank": 2')
    (attempt.exit(3)).write_text('{"rank": 3, "of": "another version"}')
    assert read_exits(attempt, 4) == {1: make_exit(1, 9, last_error="모델")}
    node.write(make_exit(0))
    assert read_exits(attempt, 4)[0] == make_exit(0)
    assert find_exited(attempt, PLAN, range(4)) == {0, 1, 2, 3}, "as before, torn or not"
    assert read_exit(attempt, PLAN, 1) == make_exit(1, 9, last_error="모델")
    assert read_exit(attempt, PLAN, 3) is None
    outcome = judge(make_exit(0, 9))
    write_outcome(attempt, outcome)
    assert read_outcome(attempt) == outcome


def test_the_end_of_an_attempt_that_nobody_judged_is_its_stop(attempt: AttemptFolder) -> None:
    assert read_reason(attempt) is None
    write_stop(attempt, "signal", 143, "SIGTERM from the scheduler")
    assert read_reason(attempt) == "SIGTERM from the scheduler"
    write_judgement(attempt, judge_exits(PLAN, {}, None, NAMES, 3.0))
    assert "the agent on n60 exited" in str(read_reason(attempt))


def test_a_full_disk_does_not_hide_an_exit(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    node = NodeExits(attempt, 0, 3)
    node.reserve()
    folder = attempt.exit(0).parent
    assert len(list(folder.iterdir())) == 1
    node.write(make_exit(2))
    monkeypatch.setattr(exits, "write_atomic", fail)
    values = [make_exit(rank, 5, last_error="모델" * 200) for rank in range(2)]
    for value in values:
        node.write(value)
        assert len(list(folder.iterdir())) == 1
    assert read_exits(attempt, 3) == {**dict(enumerate(values)), 2: make_exit(2)}
    late = NodeExits(attempt, 1, 1)
    with pytest.raises(OSError):
        late.write(make_exit(3))


def test_where_there_is_no_room_at_all_the_exits_before_stay(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    node = NodeExits(attempt, 0, 1)
    node.write(make_exit(0))
    monkeypatch.setattr(exits, "write_atomic", fail)
    with pytest.raises(OSError, match="exceeds the reserved space"):
        node.write(make_exit(1, 1, last_error="x" * 9000))
    assert read_exits(attempt, 2) == {0: make_exit(0)}


def test_exits_of_run_folders_of_before_are_read(attempt: AttemptFolder) -> None:
    for rank in range(4):
        write_json(attempt.exit(rank), asdict(make_exit(rank, rank)))
    assert read_exits(attempt, 4) == {rank: make_exit(rank, rank) for rank in range(4)}
    assert find_exited(attempt, PLAN, range(4)) == {0, 1, 2, 3}
    assert read_exit(attempt, PLAN, 3) == make_exit(3, 3)


RECORDED = {
    "message": {
        "message": "ValueError: no such shard\nat 7",
        "extraInfo": {"py_callstack": "Traceback\n  ...\nValueError: no such shard\n"},
    }
}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (json.dumps(RECORDED), "ValueError: no such shard"),
        ('{"message": "Boom"}', "Boom"),
        (json.dumps({"message": {"message": "x" * 9999}}), "x" * exits.EXCEPTION_CHARS),
        (json.dumps({"message": "x" * exits.MOST_ERROR_BYTES}), None),
        ('{"message": {"message": "Bo', None),
        ('{"message": {"message": 3}}', None),
        ('{"message": {"message": "E", "extraInfo": [1]}}', None),
        ('{"message": ""}', None),
        ("[1]", None),
        ("\xff", None),
    ],
)
def test_an_error_file_may_hold_anything(tmp_path: Path, content: str, text: str | None) -> None:
    path = tmp_path / "0.error.json"
    assert read_exception(path) is None
    path.write_text(content, encoding="latin-1")
    found = read_exception(path)
    assert (found and found.text) == text


def test_a_link_or_a_pipe_is_no_error_file(tmp_path: Path) -> None:
    (tmp_path / "real").write_text(json.dumps(RECORDED))
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "pipe")
    assert read_exception(tmp_path / "link") is None
    assert read_exception(tmp_path / "pipe") is None


@pytest.mark.slow
def test_torchs_own_error_file_is_read(tmp_path: Path) -> None:
    program = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main(): raise KeyError('tokens')\n"
        "main()\n"
    )
    path = tmp_path / "0.error.json"
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    assert subprocess.run([sys.executable, "-c", program], env=env, check=False).returncode == 1
    found = read_exception(path)
    assert found is not None and found.text == "KeyError: 'tokens'"
    assert found.stack[0].startswith("Traceback") and found.stack[-1] == found.text


LOST = (
    "varuna_core.runtime.comm.failure.RankFailed: rank 0 (stage 0, replica 0) stops: rank 0 "
    "(stage 0, replica 0): ChannelClosed: cannot receive from rank 1: it has ended"
)
"""What rank 0 reports if it notices the end of rank 1 before anyone else."""


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (make_exit(1, -15, last_error="[rank1]: KeyError: 'b'"), "rank 1 on n60 raised KeyError"),
        (make_exit(1, 1, exception="KeyError: 'b'"), "rank 1 on n60 exited 1: KeyError: 'b'"),
        (make_exit(1, -15, last_error="bye"), "rank 0 on n60 exited 1: "),
        (make_exit(1, 1, exception=LOST), "rank 0 on n60 exited 1: "),
    ],
)
def test_a_rank_that_lost_a_peer_is_not_the_culprit_if_the_peer_has_an_exception(
    peer: RankExit, reason: str
) -> None:
    """Rank 0 is gone first, and its agent stops rank 1 while that still shuts down."""
    other = make_exit(2, -15, stopped=True, last_error="RuntimeError: nobody named this rank")
    peer = replace(peer, stopped=True, ended=3.0)
    stop = {"kind": "rank", "code": 1, "reason": "", "rank": 0}
    outcome = judge(make_exit(0, 1, exception=LOST), peer, other, stopped(3), stop=stop)
    assert outcome.reason.startswith(reason)
    assert (outcome.culprit_rank, outcome.culprit_signal) == (int(reason[5]), None)
    assert outcome.code == 1


def test_an_exception_says_more_than_the_last_line(attempt: AttemptFolder) -> None:
    raised = make_exit(0, 1, last_error="warning: group not destroyed", exception="Boom: 3")
    found = judge_exits(PLAN, {0: raised}, None, NAMES, 9.0)
    assert found.end.cause is EndCause.RANK_EXCEPTION
    assert found.outcome.reason == "rank 0 on n60 exited 1: Boom: 3"
    writer = NodeExits(attempt, 0, 2)
    writer.write(raised)
    writer.write(make_exit(1, 1))
    assert read_exits(attempt, 2) == {0: raised, 1: make_exit(1, 1)}
    assert attempt.node_exits(0).read_text().count('"exception"') == 1, "older readers refuse it"

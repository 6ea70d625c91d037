"""What is read of folders and files that have far more than any run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from varuna_core.records.exits import RankExit
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.monitor.log_lines import print_logs
from vjob.jobs.monitor.log_lines.print_logs import (
    LineFilter,
    find_first_error,
    find_logs,
    render,
)
from vjob.jobs.monitor.log_lines.stream import Log, keep_plain
from vjob.jobs.monitor.readers import attempt as readers
from vjob.jobs.monitor.readers.attempt import AttemptReader


@pytest.fixture
def many(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.attempt(0).make()
    for number in range(5):
        run.attempt(0).node_log(f"n{number}", "out").write_text("0: step 1 loss 2\n")
    return run


def test_logs_of_more_nodes_than_there_are_are_counted_and_not_read(
    many: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MOST_NODES", 3)
    view = AttemptReader(many.attempt(0), None, 5).read()
    assert [node.name for node in view.nodes] == ["n0", "n1", "n2"]
    assert view.unreadable == {"attempt-0/*": "2 nodes more than the 3 that are read"}


def test_vjob_logs_says_once_which_logs_it_leaves_out(
    many: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(print_logs, "MOST_NODES", 3)
    print_logs._tell.cache_clear()
    wanted = LineFilter(
        kinds=("out",), nodes=(), ranks=(), pattern=None, raw=False, paint=keep_plain
    )
    for _ in range(2):
        assert len(find_logs(many.attempt(0), wanted)) == 3
    said = capsys.readouterr().err
    assert said == "only 3 logs of attempt-0 are read; --node names others\n"


def test_the_search_of_an_error_ends_where_its_processor_time_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(print_logs, "MOST_CPU_S", -1.0)
    path = tmp_path / "n0.out"
    path.write_text("0: RuntimeError: first\n" + "0 0 0\n" * 20_000)
    print_logs._tell.cache_clear()
    found = find_first_error(*([Log(path, "n0")] for _ in range(2)))
    assert found is not None and "first" in found.line.text
    assert "lines of n0.out are read; -n 99 shows its end" in capsys.readouterr().err


def test_an_exception_after_which_its_rank_went_on_is_called_caught(tmp_path: Path) -> None:
    path = tmp_path / "n0.err"
    path.write_text('0: Traceback (most recent call last):\n0:   File "x.py"\n0: ValueError: x\n')
    own = RankExit(0, "n0", 0, None, False, 1.0, 2.0, "")
    for one, said in ((own, True), (replace(own, code=1), False)):
        found = find_first_error(*([Log(path, "n0")] for _ in range(2)), exits=[one])
        assert found is not None
        caught = "caught: rank 0 continued after it and exited 0"
        assert (caught in list(render(found))) is said

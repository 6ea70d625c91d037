"""What is read of folders and files that have far more than any run."""

from __future__ import annotations

from pathlib import Path

import pytest

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.monitor.log_lines import print_logs
from vjob.jobs.monitor.log_lines.print_logs import LineFilter, find_logs
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
    assert view.unreadable == {"attempt-0/*": "2 nodes beyond the 3 that are read"}


def test_vjob_logs_says_once_which_logs_it_leaves_out(
    many: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(print_logs, "MOST_NODES", 3)
    print_logs.tell_once.cache_clear()
    wanted = LineFilter()
    for _ in range(2):
        assert len(find_logs(many.attempt(0), wanted)) == 3
    said = capsys.readouterr().err
    assert said == "only 3 logs of attempt-0 are read; choose with --node\n"

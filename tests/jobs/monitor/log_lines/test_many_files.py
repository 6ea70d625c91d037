"""Files that are read at once: the same look as one after another."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from varuna_core.records.files import open_to_read
from vjob.jobs.monitor.log_lines import tails
from vjob.jobs.monitor.log_lines.many_files import ManyFiles
from vjob.jobs.monitor.readers.log_folder import FolderReader


def test_results_come_in_order_from_threads_once_calls_wait() -> None:
    threads = set()

    def ask(number: int) -> int:
        threads.add(threading.current_thread())
        time.sleep(0.002)
        return -number

    many = ManyFiles()
    assert list(many.call(ask, range(100))) == [-number for number in range(100)]
    assert len(threads) > 1
    assert list(many.call(ask, range(3))) == [0, -1, -2]
    assert list(many.call(ask, ())) == []


def test_an_error_of_a_call_is_raised_where_its_result_would_be() -> None:
    def ask(number: int) -> int:
        time.sleep(0.002)
        return 1 // (number - 40)

    found = ManyFiles().call(ask, range(100))
    assert [next(found) for _ in range(40)] == [1 // (number - 40) for number in range(40)]
    with pytest.raises(ZeroDivisionError):
        next(found)


def test_a_slow_file_server_changes_nothing_that_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in range(40):
        (tmp_path / f"n{node:02}.out").write_text(f"0: step {node + 1}/90 loss 2.5\n0: hello\n")
        (tmp_path / f"n{node:02}.err").write_text("0: Traceback\n" * (node == 7))
    plain, slow = (FolderReader(tmp_path, num_lines=5, clock=lambda: 0.0) for _ in range(2))
    threads = set()

    def open_slowly(path: str) -> int:
        threads.add(threading.current_thread())
        time.sleep(0.002)
        return open_to_read(path)

    def look(reader: FolderReader, *, slowly: bool) -> object:
        with monkeypatch.context() as patch:
            if slowly:
                patch.setattr(tails, "open_to_read", open_slowly)
            return replace(reader.read(), disks=())  # other processes write on them

    assert look(slow, slowly=True) == look(plain, slowly=False)
    assert len(threads) > 1
    (tmp_path / "n39.out").write_text("0: step 60/90 loss 1.5\n")
    (tmp_path / "n11.err").unlink()
    with (tmp_path / "n12.out").open("a") as log:
        log.write("0: step 50/90 loss 1.75\n")
    assert look(slow, slowly=True) == look(plain, slowly=False)

"""A folder that cannot take a save costs the save: training goes on, and the last one waits."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.small import Gpt, make_inputs
from tests.small_disk import filled
from varuna_core import Varuna
from varuna_core.checkpoint.format.errors import NoRoom, StoreFailed
from varuna_core.checkpoint.store.store import list_complete
from varuna_core.records.checkpoints import parse_skipped
from varuna_core.records.runfolder import RunFolder
from varuna_core.runtime.saving import saving, skipping


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run whose rank this is."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.attempt(0).make()
    monkeypatch.setenv("VJOB_RUN", str(run.path))
    monkeypatch.setenv("VJOB_ATTEMPT", "0")
    return run


def build() -> Varuna:
    torch.manual_seed(0)
    return Varuna(Gpt(), "0;", make_inputs(), 4, 2, device="cpu", schedule="1f1b")


def list_saved(store: Path) -> list[int]:
    return [found.iteration for found in list_complete(store)]


def read_skipped(run: RunFolder) -> Any:
    return parse_skipped(json.loads(run.attempt(0).skipped.read_text()))


@pytest.mark.parametrize("beside", [False, True])
def test_a_save_without_room_is_skipped_and_the_next_one_made(
    small_disk: Path, tmp_path: Path, run: RunFolder, caplog: Any, beside: bool
) -> None:
    varuna = build()
    options = {"tempdir": tmp_path / "local"} if beside else {}
    pending = varuna.checkpoint(small_disk, 1, keep=1, **options)
    if pending is not None:
        pending.result()
    with filled(small_disk), caplog.at_level(logging.WARNING):
        for number in (2, 3, 4):
            varuna.checkpoint(small_disk, number, keep=1, **options)
            varuna.step(make_inputs())
    varuna.checkpoint(small_disk, 5, keep=1, **options)
    varuna.close()
    assert list_saved(small_disk) == [5]
    assert sorted(path.name for path in small_disk.iterdir()) == ["owner.json", "varuna_ckpt_5"]
    said = caplog.text
    assert f"skipped a save: {small_disk} (" in said and "No space left" in said
    found = read_skipped(run)
    assert (found.iteration, found.count, found.no_room) == (4, 3, True)
    assert found.folder == str(small_disk)


def test_a_row_of_skipped_saves_ends_with_a_complete_one(small_disk: Path, run: RunFolder) -> None:
    varuna = build()
    for first in (1, 10):
        with filled(small_disk):
            varuna.checkpoint(small_disk, first, keep=1)
        assert read_skipped(run).count == 1
        varuna.checkpoint(small_disk, first + 1, keep=1)
    varuna.close()
    assert list_saved(small_disk) == [11]


def test_the_last_save_waits_for_room_and_its_record_says_so(
    small_disk: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(saving, "RETRY_S", 0.05)
    varuna = build()
    varuna.checkpoint(small_disk, 1)
    with filled(small_disk) as filler, caplog.at_level(logging.WARNING):

        def make_room() -> None:
            while "is not saved yet" not in caplog.text:
                time.sleep(0.01)
            filler.unlink()

        beside = threading.Thread(target=make_room)
        beside.start()
        varuna.checkpoint(small_disk, 2, on_demand=True)
        beside.join()
    assert list_saved(small_disk) == [1, 2]
    found = read_skipped(run)
    assert found.waits and found.no_room and found.iteration == 2
    varuna.close()


def test_the_last_save_does_not_wait_for_ever(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "WAIT_S", 0.2)
    monkeypatch.setattr(saving, "RETRY_S", 0.05)
    varuna = build()
    varuna.checkpoint(small_disk, 1)
    with filled(small_disk), pytest.raises(NoRoom, match="iteration 2 was not saved"):
        varuna.checkpoint(small_disk, 2, on_demand=True)
    assert list_saved(small_disk) == [1]
    varuna.close()


def test_a_rank_that_is_to_end_does_not_wait_for_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "RETRY_S", 0.05)
    varuna = build()
    varuna.saving.is_told_to_end = lambda: True
    with filled(small_disk), pytest.raises(NoRoom):
        varuna.checkpoint(small_disk, 1, on_demand=True)
    varuna.close()


def test_a_file_server_that_fails_is_put_up_with_for_a_while(
    tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the mount of this node alone: another one could go on."""
    varuna = build()
    varuna.checkpoint(tmp_path / "store", 1)

    def fail(*given: Any, **named: Any) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as broken:
        broken.setattr("varuna_core.checkpoint.store.writer.write_file", fail)
        for number in range(2, skipping.MOST_FAILED + 1):
            varuna.checkpoint(tmp_path / "store", number)
        assert read_skipped(run).no_room is False
        with pytest.raises(StoreFailed):
            varuna.checkpoint(tmp_path / "store", 99)
    varuna.checkpoint(tmp_path / "store", 100)
    assert list_saved(tmp_path / "store") == [1, 100]
    varuna.close()

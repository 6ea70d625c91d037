"""Folders of checkpoints as everybody reads them, without torch."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from varuna_core.records import checkpoints
from varuna_core.records.checkpoints import (
    Damaged,
    Skipped,
    find_fit,
    find_full,
    find_newest,
    list_complete,
    list_damaged,
    note_skipped,
    parse_skipped,
)
from varuna_core.records.files import read_json

MIB = 1 << 20


def write_checkpoint(store: Path, name: str, size: int = 3) -> Path:
    folder = store / name
    folder.mkdir(parents=True)
    (folder / "part").write_bytes(b"x" * size)
    content = {"content": {"files": {"part": {"size": size}}}}
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def test_complete_ones_are_in_order_and_the_newest_fit_one_is_found(tmp_path: Path) -> None:
    for name in ("varuna_ckpt_10", "varuna_ckpt_9", "varuna_ckpt_30", "varuna_ckpt_20.x.partial"):
        write_checkpoint(tmp_path, name)
    write_checkpoint(tmp_path, "varuna_ckpt_40.x.removed")
    (tmp_path / "varuna_ckpt_50").mkdir()
    assert [one.iteration for one in list_complete(tmp_path)] == [9, 10, 20, 30]
    (tmp_path / "varuna_ckpt_30/part").write_bytes(b"x")
    fit = find_fit(tmp_path)
    assert fit is not None and fit.iteration == 20


def test_damaged_ones_are_listed_with_their_reason_oldest_first(tmp_path: Path) -> None:
    for iteration in (20, 3):
        write_checkpoint(tmp_path, f"varuna_ckpt_{iteration}.x.damaged")
    (tmp_path / "varuna_ckpt_3.x.damaged/damage.json").write_text('{"reason": "a torn part"}')
    write_checkpoint(tmp_path, "varuna_ckpt_5")
    assert list_damaged(tmp_path) == [
        Damaged(3, str(tmp_path / "varuna_ckpt_3.x.damaged"), "a torn part"),
        Damaged(20, str(tmp_path / "varuna_ckpt_20.x.damaged"), "nobody wrote why"),
    ]


def test_the_newest_is_ours_or_what_another_engine_says(tmp_path: Path) -> None:
    assert find_newest(tmp_path) is None
    ours = write_checkpoint(tmp_path, "varuna_ckpt_30")
    os.utime(ours / "manifest.json", (1000.0, 1000.0))
    newest = find_newest(tmp_path)
    assert newest is not None and (newest.step, newest.written) == (30, 1000.0)
    (tmp_path / "latest").write_text("global_step40\n")
    os.utime(tmp_path / "latest", (2000.0, 2000.0))
    newest = find_newest(tmp_path)
    assert newest is not None and (newest.step, newest.written) == (40, 2000.0)
    (tmp_path / "latest").write_text("best")
    newest = find_newest(tmp_path)
    assert newest is not None and newest.step == 30


def test_saves_that_are_skipped_in_a_row_are_counted(tmp_path: Path) -> None:
    path, store = tmp_path / "skipped.json", tmp_path / "store"

    def note(iteration: int, since: float, waits: bool = False) -> Skipped | None:
        one = Skipped(iteration, 1, since, str(store), "full", True, waits)
        note_skipped(path, store, one)
        return parse_skipped(read_json(path))

    assert note(10, 100.0) == Skipped(10, 1, 100.0, str(store), "full", True, False)
    assert note(20, 200.0) == Skipped(20, 2, 100.0, str(store), "full", True, False)
    assert note(20, 201.0) == Skipped(20, 2, 100.0, str(store), "full", True, False)
    assert note(20, 202.0, waits=True) == Skipped(20, 2, 100.0, str(store), "full", True, True)
    assert note(15, 203.0) == Skipped(20, 2, 100.0, str(store), "full", True, True)
    write_checkpoint(store, "varuna_ckpt_30")
    assert note(40, 400.0) == Skipped(40, 1, 400.0, str(store), "full", True, False)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that the disk of a folder has free, by the folder's name."""
    found: dict[str, int] = {}
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda place: SimpleNamespace(f_bavail=found[Path(place).name] // 4096, f_frsize=4096),
    )
    return found


def test_a_run_needs_room_for_a_record_and_its_store_for_a_checkpoint_like_the_newest(
    tmp_path: Path, free: dict[str, int]
) -> None:
    run, store = tmp_path / "run", tmp_path / "store"
    run.mkdir()
    write_checkpoint(store, "varuna_ckpt_1", size=9 * MIB)
    write_checkpoint(store, "varuna_ckpt_2", size=2 * MIB)
    free |= {"run": MIB, "store": 4 * MIB}
    assert find_full(run, store) is None
    free["store"] = 2 * MIB
    assert find_full(run, store) == store
    assert find_full(run, None) is None
    free["run"] = MIB // 2
    assert find_full(run, None) == find_full(run, store) == run
    assert sorted(os.listdir(run)) == []


def test_of_a_store_that_is_not_made_yet_the_folder_above_counts(
    tmp_path: Path, free: dict[str, int]
) -> None:
    free[tmp_path.name] = 0
    assert find_full(tmp_path, tmp_path / "not/made") == tmp_path
    free[tmp_path.name] = MIB
    assert find_full(tmp_path, tmp_path / "not/made") is None


@pytest.mark.parametrize(
    ("number", "is_full"), [(errno.EDQUOT, True), (errno.ENOSPC, True), (errno.EACCES, False)]
)
def test_of_a_quota_only_a_write_tells(
    number: int,
    is_full: bool,
    tmp_path: Path,
    free: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: Path, text: str) -> None:
        path.write_text("torn")
        raise OSError(number, "refused")

    free[tmp_path.name] = 100 * MIB
    monkeypatch.setattr(checkpoints, "write_atomic", refuse)
    assert find_full(tmp_path, None) == (tmp_path if is_full else None)
    assert os.listdir(tmp_path) == []

"""A folder of checkpoints: what is complete, what is kept, and two jobs in one folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.ranks.checkpoint_world import IN_MEMORY, Job, expect_state, make_part
from varuna_core.checkpoint.cli import main
from varuna_core.checkpoint.format.document import crc_text, write_document
from varuna_core.checkpoint.format.errors import (
    CheckpointError,
    DamagedCheckpoint,
    FolderTaken,
    ForeignCheckpoint,
    NoCheckpoint,
)
from varuna_core.checkpoint.format.manifest import Save
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.checkpoint.store.store import Owner, SaveFolder, find_damage, list_complete
from varuna_core.checkpoint.store.writer import CheckpointWriter, write_rank
from varuna_core.records.checkpoints import find_newest

PLAIN = Job(store="", job="a", iterations=[])


def save(writer: CheckpointWriter, *iterations: int) -> None:
    for iteration in iterations:
        writer.save(make_part(PLAIN, 0, iteration))


def names(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir())


def interrupt(self: SaveFolder, may_replace: object) -> None:
    raise KeyboardInterrupt


def list_iterations(store: Path) -> list[int]:
    return [found.iteration for found in list_complete(store)]


@pytest.mark.parametrize("keep", [1, 2, 6])
def test_keep_counts_from_the_first_checkpoint_on(tmp_path: Path, keep: int) -> None:
    writer = CheckpointWriter(tmp_path, job="a", keep=keep)
    for iteration in range(1, 9):
        save(writer, iteration)
        assert list_iterations(tmp_path) == list(range(max(1, iteration + 1 - keep), iteration + 1))


def test_of_a_hundred_checkpoints_the_newest_three_are_kept() -> None:
    part = make_part(PLAIN, 0, 1)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        store = Path(folder)
        writer = CheckpointWriter(store, job="a", keep=3)
        for iteration in range(100):
            writer.save(replace(part, iteration=iteration))
            assert len(list_complete(store)) == min(iteration + 1, 3)
        writer.close()
        assert names(store) == ["owner.json", *(f"varuna_ckpt_{i}" for i in (97, 98, 99))]


def test_what_goes_is_out_of_the_list_at_once_and_deleted_before_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, delete = threading.Event(), shutil.rmtree

    def wait_and_delete(folder: Path, **options: bool) -> None:
        assert opened.wait(30)
        delete(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", wait_and_delete)
    writer = CheckpointWriter(tmp_path, job="a", keep=1)
    save(writer, 1, 2)
    assert list_iterations(tmp_path) == [2]
    assert names(tmp_path) == ["owner.json", "varuna_ckpt_1.a.1.removed", "varuna_ckpt_2"]
    opened.set()
    save(writer, 3)
    assert "varuna_ckpt_1.a.1.removed" not in names(tmp_path)
    writer.close()
    assert names(tmp_path) == ["owner.json", "varuna_ckpt_3"]


def test_keep_counts_those_of_the_training_that_is_continued(tmp_path: Path) -> None:
    """And a checkpoint just made stays, though abandoned ones have later iterations."""
    save(CheckpointWriter(tmp_path, job="first"), 10, 20, 30)
    with CheckpointReader.open(tmp_path, 10) as reader:
        line = reader.line
    writer = CheckpointWriter(tmp_path, job="second", line=line, keep=2)
    save(writer, 15)
    assert list_iterations(tmp_path) == [15, 30]
    save(writer, 20, 30)
    assert list_iterations(tmp_path) == [20, 30]
    assert CheckpointReader.open(tmp_path).manifest.save.job == "second"


def test_a_checkpoint_names_the_run_that_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status offered a run to continue from the checkpoint of another run of its sweep."""
    monkeypatch.setenv("VJOB_RUN", "/log/lr-1")
    save(CheckpointWriter(tmp_path, job="first"), 10)
    newest = find_newest(tmp_path)
    assert newest is not None and newest.run == "lr-1"
    for run, since, is_other in (
        ("lr-1", newest.written - 1, False),
        ("lr-2", newest.written - 1, True),
        ("lr-2", newest.written + 1, False),  # it may have resumed from there
    ):
        assert newest.is_of_other(run, since) is is_other


def test_a_stranger_keeps_away_from_what_was_there(tmp_path: Path) -> None:
    save(CheckpointWriter(tmp_path, job="first"), 10, 20)
    writer = CheckpointWriter(tmp_path, job="other", keep=1)
    save(writer, 11, 12)
    assert list_iterations(tmp_path) == [10, 12, 20]
    with pytest.raises(FolderTaken, match=r"varuna_ckpt_20 already exists, of job first"):
        save(writer, 20)
    assert CheckpointReader.open(tmp_path, 20).manifest.save.job == "first"


def test_the_same_iteration_again_replaces_it(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, job="a")
    save(writer, 10)
    before = CheckpointReader.open(tmp_path).manifest.save.save
    save(writer, 10)
    after = CheckpointReader.open(tmp_path)
    assert (before, after.manifest.save.save) == ("a.1", "a.2")
    expect_state(after)
    assert names(tmp_path) == ["owner.json", "varuna_ckpt_10"]


def test_whose_it_is_can_be_read_from_the_manifest_alone(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, job="a", keep=1)
    save(writer, 10)
    (tmp_path / "varuna_ckpt_10" / "save.json").write_text("")
    save(writer, 10, 11)
    assert list_iterations(tmp_path) == [11]


def test_of_two_jobs_in_one_folder_the_first_is_told_and_both_keep_theirs(tmp_path: Path) -> None:
    first = CheckpointWriter(tmp_path, job="first", keep=1)
    second = CheckpointWriter(tmp_path, job="second", keep=1)
    save(first, 10)
    save(second, 15)
    with pytest.raises(FolderTaken, match=r"job second on .* has saved into .* since .* end one"):
        save(first, 20)
    with pytest.raises(FolderTaken, match=r"varuna_ckpt_10 already exists, of job first"):
        save(second, 10)
    assert list_iterations(tmp_path) == [10, 15]
    for found in list_complete(tmp_path):
        assert list(find_damage(found.path)) == []


def test_two_that_continue_one_training_do_not_replace_each_others(tmp_path: Path) -> None:
    save(CheckpointWriter(tmp_path, job="root"), 10)
    first = CheckpointWriter(tmp_path, job="first", line="root", keep=1)
    second = CheckpointWriter(tmp_path, job="second", line="root", keep=1)
    save(second, 15)
    save(first, 20)
    with pytest.raises(FolderTaken):
        save(second, 20)
    assert CheckpointReader.open(tmp_path, 20).manifest.save.job == "first"


@pytest.mark.parametrize("who_first", [0, 1])
def test_two_jobs_that_finish_one_iteration_at_once(tmp_path: Path, who_first: int) -> None:
    """Both have looked and found it free; the rename decides."""
    folders = []
    for job in ("a", "b"):
        Owner(tmp_path, job, job).claim()
        folder = SaveFolder(tmp_path, Save(iteration=7, save=f"{job}.1", job=job, line=job))
        write_rank(folder, make_part(PLAIN, 0, 7), 0, 1)
        folders.append((folder, Owner(tmp_path, job, job)))
    folder, owner = folders[who_first]
    assert folder.commit(owner.may_replace)
    folder, owner = folders[1 - who_first]
    with pytest.raises(FolderTaken):
        folder.commit(owner.may_replace)
    with CheckpointReader.open(tmp_path) as reader:
        assert reader.manifest.save.job == "ab"[who_first]
        expect_state(reader)


def test_two_ranks_that_both_see_all_markers_publish_once(tmp_path: Path) -> None:
    Owner(tmp_path, "a", "a").claim()
    one, other = (
        SaveFolder(tmp_path, Save(iteration=7, save="a.1", job="a", line="a")) for _ in range(2)
    )
    write_rank(one, make_part(PLAIN, 0, 7), 0, 1)
    assert one.commit(lambda _: False) and not other.commit(lambda _: False)
    assert names(tmp_path) == ["owner.json", "varuna_ckpt_7"]


def leave_partial(store: Path, job: str, line: str, iteration: int) -> Path:
    """As a job that was killed: rank 1's part is missing."""
    folder = SaveFolder(store, Save(iteration=iteration, save=f"{job}.1", job=job, line=line))
    write_rank(folder, make_part(PLAIN, 0, iteration), 0, 2)
    return folder.path


def test_what_nobody_writes_any_more_is_cleared_away(tmp_path: Path) -> None:
    save(CheckpointWriter(tmp_path, job="root"), 5)
    left = leave_partial(tmp_path, "died", "root", 10)
    strange = leave_partial(tmp_path, "stranger", "stranger", 10)
    idle = leave_partial(tmp_path, "idle", "idle", 10)
    going = tmp_path / "varuna_ckpt_3.root.1.removed"
    (going / "deep").mkdir(parents=True)
    for path in (idle, *idle.rglob("*")):
        os.utime(path, (1e9, 1e9))
    assert list_iterations(tmp_path) == [5]
    save(CheckpointWriter(tmp_path, job="next", line="root"), 6)
    assert not left.exists() and not idle.exists() and not going.exists()
    assert strange.exists() and list_iterations(tmp_path) == [5, 6]


def test_what_was_complete_but_for_its_name_is_loaded(tmp_path: Path) -> None:
    """Killed between the manifest and the rename, the older one already aside."""
    folder = SaveFolder(tmp_path, Save(iteration=7, save="a.1", job="a", line="a"))
    write_rank(folder, make_part(PLAIN, 0, 7), 0, 1)
    assert list_complete(tmp_path) == []
    with pytest.raises(KeyboardInterrupt), patch.object(SaveFolder, "publish", interrupt):
        folder.commit(lambda _: False)
    with CheckpointReader.open(tmp_path) as reader:
        assert reader.folder == folder.path
        expect_state(reader)


def test_what_was_complete_but_for_its_name_counts_among_those_that_are_kept(
    tmp_path: Path,
) -> None:
    save(CheckpointWriter(tmp_path, job="root"), 5)
    folder = SaveFolder(tmp_path, Save(iteration=7, save="a.1", job="a", line="root"))
    write_rank(folder, make_part(PLAIN, 0, 7), 0, 1)
    with pytest.raises(KeyboardInterrupt), patch.object(SaveFolder, "publish", interrupt):
        folder.commit(lambda _: False)
    save(CheckpointWriter(tmp_path, job="next", line="root", keep=2), 9)
    assert list_iterations(tmp_path) == [7, 9]


def test_what_cannot_be_cleared_away_keeps_no_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = CheckpointWriter(tmp_path, job="a", keep=1)
    save(writer, 5)
    with patch.object(Owner, "clean", side_effect=OSError("stale")):
        save(writer, 6)
    assert list_iterations(tmp_path) == [6] and "were not removed: stale" in caplog.text


def test_a_listing_that_came_too_late_is_made_up_for(tmp_path: Path) -> None:
    """Neither rank saw the other's marker; the next call completes the checkpoint."""
    job = replace(PLAIN, stages=2)
    writers = [CheckpointWriter(tmp_path, job="a", rank=r, world_size=2) for r in range(2)]
    for rank, writer in enumerate(writers):
        with patch.object(SaveFolder, "commit", return_value=False):
            writer.save(make_part(job, rank, 3))
    assert list_complete(tmp_path) == []
    writers[1].close()
    writers[0].close()
    with CheckpointReader.open(tmp_path) as reader:
        expect_state(reader)


def test_what_there_is_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoCheckpoint, match=r"holds no complete checkpoint$"):
        CheckpointReader.open(tmp_path)
    left = leave_partial(tmp_path, "died", "other", 10)
    with pytest.raises(NoCheckpoint, match=re.escape(f"incomplete: {left.name}")):
        CheckpointReader.open(tmp_path)
    assert main(["inspect", str(left)]) == 2
    save(CheckpointWriter(tmp_path, job="root"), 5)
    with pytest.raises(NoCheckpoint, match=r"of iteration 7 \(complete: 5\)"):
        CheckpointReader.open(tmp_path, 7)
    with pytest.raises(NoCheckpoint, match=r"its save never finished; load iteration 5 instead"):
        CheckpointReader(left)
    with pytest.raises(NoCheckpoint, match=r"there is no folder .*; load iteration 5 instead"):
        CheckpointReader(tmp_path / "varuna_ckpt_9")
    assert main(["inspect", str(tmp_path)]) == 0
    assert "all files there" in capsys.readouterr().out


def test_folders_of_others_are_neither_read_nor_touched(tmp_path: Path) -> None:
    old = tmp_path / "varuna_ckpt_30"
    old.mkdir()
    (old / "opt-fp32-params-0").write_bytes(b"\x80\x02pickle")
    with pytest.raises(NoCheckpoint, match="of the original Varuna, which cannot be read"):
        CheckpointReader.open(tmp_path)
    with pytest.raises(ForeignCheckpoint, match="is not a checkpoint of vjob"):
        CheckpointReader(old)
    writer = CheckpointWriter(tmp_path, job="a", keep=1)
    save(writer, 31, 32)
    with pytest.raises(FolderTaken, match="whose owner is not known"):
        save(writer, 30)
    assert (old / "opt-fp32-params-0").exists() and list_iterations(tmp_path) == [32]


def change_manifest(folder: Path, change: Any) -> None:
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    data = json.dumps(document["content"], sort_keys=True, separators=(",", ":")).encode()
    document["crc32"] = crc_text(data)
    path.write_text(json.dumps(document))


def test_a_later_format_is_named(tmp_path: Path) -> None:
    save(CheckpointWriter(tmp_path, job="a"), 5)
    change_manifest(tmp_path / "varuna_ckpt_5", lambda d: d.update(varuna_checkpoint=3))
    with pytest.raises(ForeignCheckpoint, match=r"manifest.json has format 3, but this version"):
        CheckpointReader.open(tmp_path)


def test_a_manifest_of_other_fields_is_no_manifest(tmp_path: Path) -> None:
    save(CheckpointWriter(tmp_path, job="a"), 5)
    change_manifest(tmp_path / "varuna_ckpt_5", lambda d: d["content"].pop("files"))
    with pytest.raises(DamagedCheckpoint, match=r"is not a manifest of this version"):
        CheckpointReader.open(tmp_path)
    (tmp_path / "varuna_ckpt_5" / "manifest.json").write_text('{"some": "json"}')
    with pytest.raises(ForeignCheckpoint, match="not a file of a vjob checkpoint"):
        CheckpointReader.open(tmp_path)


def test_a_failed_save_on_one_rank_leaves_the_ranks_in_step(tmp_path: Path) -> None:
    """Its error comes out in place of the next save; the one after that is whole again."""
    job = replace(PLAIN, stages=2)
    writers = [
        CheckpointWriter(tmp_path, job="a", rank=rank, world_size=2, background=True)
        for rank in range(2)
    ]
    part = make_part(job, 1, 1)
    unknown = part.segments[2][0]._replace(kind="weight\0", name="")
    bad = replace(part, segments={2: [unknown, unknown]})
    for iteration in (1, 2, 3):
        writers[0].save(make_part(job, 0, iteration))
        writers[0].wait()
        if iteration == 2:
            with pytest.raises(ValueError, match="two tensors of one file"):
                writers[1].save(make_part(job, 1, iteration))
        else:
            writers[1].save(bad if iteration == 1 else make_part(job, 1, iteration))
    for writer in writers:
        writer.close()
    assert list_iterations(tmp_path) == [3]


def test_an_error_of_the_background_comes_out_at_the_next_call(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, job="a", background=True)
    save(writer, 1)
    writer.wait()
    shutil.rmtree(tmp_path)
    tmp_path.write_text("a file where the folder was")
    save(writer, 2)
    with pytest.raises((CheckpointError, OSError)):
        save(writer, 3)
    writer.close()


def test_a_job_is_a_word_that_fits_a_file_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="job 'a/b'"):
        CheckpointWriter(tmp_path, job="a/b")
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointWriter(tmp_path, job="a", keep=0)


def test_a_folder_of_checkpoints_is_its_owners_alone_where_it_is_made(tmp_path: Path) -> None:
    made, there = tmp_path / "made", tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    for store in (made, there):
        Owner(store, "a", "a").claim()
    assert made.stat().st_mode & 0o777 == 0o700
    assert there.stat().st_mode & 0o777 == 0o755


def test_a_document_is_not_written_through_a_link(tmp_path: Path) -> None:
    """The name beside it was that of the host and the process, which anybody may guess."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("", "0", "1"):
        guess = f".save.json.{os.uname().nodename}.{os.getpid()}{name}.part"
        (tmp_path / guess).symlink_to(victim)
    write_document(tmp_path / "save.json", "save", {}, durable=False)
    assert victim.read_text() == "mine"

"""Which checkpoint is loaded where some are damaged, and what becomes of those."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.ranks.checkpoint_world import Job, save_all
from varuna_core.checkpoint.format.errors import DamagedCheckpoint, ForeignCheckpoint, NoCheckpoint
from varuna_core.checkpoint.store import aside as aside_module
from varuna_core.checkpoint.store.aside import Choice, set_aside
from varuna_core.records.checkpoints import find_fit, list_complete, list_damaged


@pytest.fixture
def store(tmp_path: Path) -> Path:
    save_all(Job(store=str(tmp_path / "store"), job="a", iterations=[1, 2, 3]), 0)
    return tmp_path / "store"


def cut(folder: Path) -> None:
    path = max(folder.glob("segment*"))
    path.write_bytes(path.read_bytes()[:-1])


def take(store: Path, iteration: int | None = None) -> str:
    return Choice(store, iteration, True).take().folder.name


def test_the_newest_is_taken_and_nothing_touched(store: Path) -> None:
    assert take(store) == "varuna_ckpt_3"
    assert list_damaged(store) == []


@pytest.mark.parametrize("what", ["segment", "missing", "manifest"])
def test_damaged_ones_are_passed_over_down_to_a_whole_one(what: str, store: Path) -> None:
    for number in (2, 3):
        folder = store / f"varuna_ckpt_{number}"
        if what == "segment":
            cut(folder)
        elif what == "missing":
            max(folder.glob("segment*")).unlink()
        else:
            (folder / "manifest.json").write_bytes(b"")
    fit = find_fit(store)
    assert fit is not None and fit.iteration == 1
    assert take(store) == "varuna_ckpt_1"
    assert [one.iteration for one in list_damaged(store)] == [2, 3]
    assert all(f"varuna_ckpt_{one.iteration}/" in one.reason for one in list_damaged(store))
    assert [one.iteration for one in list_complete(store)] == [1]


def test_what_ranks_find_is_set_aside_by_the_next_look(store: Path) -> None:
    choice = Choice(store, None, True)
    folder = choice.take().folder
    choice.refuse(folder, DamagedCheckpoint("rank 3: a checksum differs"))
    assert choice.take().folder.name == "varuna_ckpt_2"
    (one,) = list_damaged(store)
    assert (one.iteration, one.reason) == (3, "rank 3: a checksum differs")


def test_one_that_was_asked_for_is_an_error_and_stays(store: Path) -> None:
    cut(store / "varuna_ckpt_3")
    with pytest.raises(DamagedCheckpoint):
        take(store, 3)
    choice = Choice(store, 2, True)
    with pytest.raises(DamagedCheckpoint, match="as it was said"):
        choice.refuse(choice.take().folder, DamagedCheckpoint("as it was said"))
    assert list_damaged(store) == []


def test_an_empty_folder_is_a_beginning_and_a_spoilt_one_is_none(store: Path) -> None:
    with pytest.raises(NoCheckpoint):
        take(store.parent / "empty")
    for found in list_complete(store):
        cut(found.path)
    for _ in range(2):  # the second look finds nothing but what the first has set aside
        with pytest.raises(DamagedCheckpoint, match="3 damaged, varuna_ckpt_3"):
            take(store)


def test_a_later_format_is_not_passed_over(store: Path) -> None:
    """A training that went on with a newer version would lose its last days in silence."""
    path = store / "varuna_ckpt_3" / "manifest.json"
    path.write_text(path.read_text().replace('"varuna_checkpoint": 2', '"varuna_checkpoint": 9'))
    with pytest.raises(ForeignCheckpoint):
        take(store)
    assert list_damaged(store) == []


def test_where_nothing_can_be_renamed_it_is_passed_over(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(folder: Path, reason: str) -> Path:
        raise PermissionError(f"{folder} is read-only")

    monkeypatch.setattr(aside_module, "set_aside", refuse)
    cut(store / "varuna_ckpt_3")
    assert take(store) == "varuna_ckpt_2"
    assert "cannot be renamed" in caplog.text
    assert (store / "varuna_ckpt_3").exists()


def test_one_that_is_gone_is_not_damaged(store: Path) -> None:
    """Another job's rename or removal, between the look and the load."""
    choice = Choice(store, None, True)
    folder = choice.take().folder
    shutil.rmtree(folder)
    choice.refuse(folder, DamagedCheckpoint("a file is missing"))
    assert choice.take().folder.name == "varuna_ckpt_2"
    assert list_damaged(store) == []


def test_a_job_that_goes_on_saves_anew_and_never_clears_them_away(store: Path) -> None:
    cut(store / "varuna_ckpt_3")
    assert take(store) == "varuna_ckpt_2"
    save_all(Job(store=str(store), job="b", line="a", iterations=[3, 4], keep=1), 0)
    assert [one.iteration for one in list_complete(store)] == [4]
    assert [one.iteration for one in list_damaged(store)] == [3]
    assert max(Path(list_damaged(store)[0].path).glob("segment*")).stat().st_size > 0


def test_two_of_one_name_both_stay(store: Path) -> None:
    for _ in range(3):
        folder = store / "varuna_ckpt_7"
        folder.mkdir()
        (folder / "manifest.json").write_text("")
        set_aside(folder, "no manifest")
    assert [one.iteration for one in list_damaged(store)] == [7, 7, 7]
    assert take(store) == "varuna_ckpt_3"


def test_a_look_reads_each_manifest_once(store: Path) -> None:
    known: set[Path] = set()
    assert find_fit(store, known) == list_complete(store)[-1]
    cut(store / "varuna_ckpt_3")
    assert find_fit(store, known) == list_complete(store)[-1]
    known.clear()
    assert find_fit(store, known) == list_complete(store)[-2]

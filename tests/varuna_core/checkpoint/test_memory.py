"""A rank's copies in a folder: two take turns, what fails goes, and room is asked for first."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from varuna_core.checkpoint.format.entries import CheckpointPart, make_entry  # noqa: E402
from varuna_core.checkpoint.format.manifest import TrainingState  # noqa: E402
from varuna_core.checkpoint.store import memory  # noqa: E402
from varuna_core.checkpoint.store.memory import MemoryCopies  # noqa: E402
from varuna_core.records.memory_copies import find_whole, list_copies, list_held  # noqa: E402

SIZE = 1000


def build_part(iteration: int) -> CheckpointPart:
    weight = torch.full((SIZE,), float(iteration))
    state = TrainingState(partition="1", shapes={"w": (SIZE,)})
    entries = {0: [make_entry("weight", "w", weight)]}
    return CheckpointPart(iteration=iteration, segments=entries, shared=True, state=state)


def open_copies(home: Path, rank: int = 0) -> MemoryCopies:
    return MemoryCopies(home, attempt=1, rank=rank, world_size=2, neighbours=2)


def name(iteration: int, number: int) -> str:
    return f"varuna_ckpt_{iteration}.1.{number}.partial"


def test_two_take_turns_and_the_one_that_a_training_began_with_is_the_first(tmp_path: Path) -> None:
    for old in ("varuna_ckpt_5.0.1.partial", "varuna_ckpt_10.0.2.partial"):
        (tmp_path / old).mkdir()
    copies = open_copies(tmp_path)
    copies.begin_from("varuna_ckpt_10.0.2.partial")
    assert list_copies(tmp_path) == ["varuna_ckpt_10.0.2.partial"]
    kept = []
    for iteration in (20, 30, 40):
        copies.lay(build_part(iteration), 0, 1, "line")
        copies.settle()
        kept.append(list_copies(tmp_path))
    assert kept == [
        ["varuna_ckpt_10.0.2.partial", name(20, 1)],
        [name(20, 1), name(30, 2)],
        [name(30, 2), name(40, 3)],
    ]
    whole = find_whole({"here": list_held(tmp_path)})
    assert whole is not None and whole.name == name(40, 3)


def test_what_is_laid_is_what_there_was_when_it_was_begun(tmp_path: Path) -> None:
    copies, part = open_copies(tmp_path), build_part(7)
    weight = part.segments[0][0].load()
    copies.lay(part, 0, 1, "line")
    weight.zero_()
    copies.settle()
    (file,) = (tmp_path / name(7, 1)).glob("segment-*")
    assert file.read_bytes().endswith(torch.full((SIZE,), 7.0).numpy().tobytes())


def test_a_rank_that_fails_to_write_takes_its_own_files_away_and_lays_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = open_copies(tmp_path, 0), open_copies(tmp_path, 1)
    for copies in (first, second):
        copies.lay(build_part(10), copies._rank, 2, "line")
        copies.settle()
    second.lay(build_part(20), 1, 2, "line")
    second.settle()
    write = memory.write_rank

    def fill_up(*words: Any) -> None:
        write(*words)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory, "write_rank", fill_up)
    with caplog.at_level(logging.WARNING):
        first.lay(build_part(20), 0, 2, "line")
        first.settle()
    assert first.is_off and "no more copies in memory: iteration 20" in caplog.text
    assert list_held(tmp_path) == (
        f"{name(10, 1)}/0-of-2", f"{name(10, 1)}/1-of-2", f"{name(20, 2)}/1-of-2",
    )  # fmt: skip
    first.clear()
    assert not list(tmp_path.rglob("*rank-0000*"))
    assert f"{name(20, 2)}/1-of-2" in list_held(tmp_path)


@pytest.mark.parametrize("more", [-1, 0])
def test_there_must_be_room_for_three_of_each_rank_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    monkeypatch.setattr(memory, "find_room", lambda home: 3 * 2 * SIZE * 4 + more)
    copies = open_copies(tmp_path)
    assert copies.fits(build_part(1)) is (more == 0)
    monkeypatch.undo()
    assert not open_copies(tmp_path / "gone").fits(build_part(1))
    (tmp_path / name(1, 1)).mkdir()
    copies.refuse()
    assert copies.is_off and not list_copies(tmp_path)

"""A program hears of a checkpoint that began, and of it being complete only once it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks.checkpoint_world import Job, make_part
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.store.writer import CheckpointWriter
from varuna_core.runtime.saving.progress import SaveNews

JOB = Job(store="", job="a", iterations=[])


class Heard:
    """The news of rank 0, whose part is written by `save`."""

    def __init__(self, store: Path, world: int, **options: int) -> None:
        self.words: list[str] = []
        self.news = SaveNews()
        self.news.subscribe(
            lambda number, store: self.words.append(f"begun {number}"),
            lambda number, store: self.words.append(f"complete {number}"),
        )
        self.writers = [
            CheckpointWriter(store, job="a", rank=rank, world_size=world, **options)
            for rank in range(world)
        ]

    def save(self, rank: int, iteration: int) -> None:
        part = make_part(JOB, 0, iteration)
        if rank:
            self.writers[rank].save(replace(part, state=None, segments={}, optimizer={}))
            return
        self.news.report_begun(iteration, self.writers[0].store)
        self.news.expect(iteration, self.writers[0].save(part))


def test_a_checkpoint_is_complete_when_the_last_rank_has_written(tmp_path: Path) -> None:
    heard = Heard(tmp_path, 2)
    heard.save(0, 1)
    heard.news.poll()
    assert heard.words == ["begun 1"]
    heard.save(1, 1)
    heard.news.poll()
    heard.news.poll()
    assert heard.words == ["begun 1", "complete 1"]


def test_one_that_fails_is_never_told_of_and_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard(tmp_path, 2)
    heard.save(0, 1)
    with monkeypatch.context() as patched:
        patched.setattr("varuna_core.checkpoint.store.writer.write_rank", refuse_to_write)
        with pytest.raises(CheckpointError, match="no space"):
            heard.save(1, 1)
    heard.news.poll()
    heard.save(0, 2)
    heard.save(1, 2)
    heard.news.poll()
    assert heard.words == ["begun 1", "begun 2", "complete 2"]


def refuse_to_write(*words: object) -> None:
    raise OSError("no space")


def test_an_older_checkpoint_of_the_same_number_is_not_taken_for_it(tmp_path: Path) -> None:
    heard = Heard(tmp_path, 2)
    for rank in (0, 1):
        heard.save(rank, 1)
    heard.news.poll()
    heard.save(0, 1)
    heard.news.poll()
    assert heard.words == ["begun 1", "complete 1", "begun 1"]
    heard.save(1, 1)
    heard.news.poll()
    assert heard.words[3:] == ["complete 1"]


def test_who_does_not_ask_hears_nothing(tmp_path: Path) -> None:
    heard = Heard(tmp_path, 1)
    heard.news = SaveNews()
    heard.save(0, 1)
    heard.news.poll()
    assert heard.words == []

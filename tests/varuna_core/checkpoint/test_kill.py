"""Killed at any instant, or out of space: the last complete checkpoint loads, the rest is cleared.

The instants are of two kinds: 50 seeded times within a save of several ranks, and, with strace,
just before each system call that changes the folder.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.ranks.checkpoint_world import IN_MEMORY, Job, World, expect_state, make_part, open_world
from varuna_core.checkpoint.format.errors import CheckpointError, NoRoom
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.checkpoint.store.store import find_damage, list_complete
from varuna_core.checkpoint.store.writer import CheckpointWriter

SCALE = 40
"""Files of some hundred KiB."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world() as opened:
        yield opened


def expect_whole(store: Path) -> list[int]:
    """Every complete checkpoint has every bit, and only those look like one."""
    complete = list_complete(store)
    for found in complete:
        assert list(find_damage(found.path)) == []
    with CheckpointReader.open(store) as reader:
        expect_state(reader, SCALE)
    return [found.iteration for found in complete]


def list_left(store: Path) -> set[str]:
    """Names, but for those of a start that was cut off before anything was in it: an hour is left
    to whoever may be making it."""
    return {
        path.name
        for path in store.iterdir()
        if not path.name.startswith(".")
        and not (path.name.endswith(".partial") and not (path / "save.json").exists())
    }


@pytest.mark.parametrize("how_many", ["one", "all"])
def test_kill_9_at_seeded_instants_of_a_save(world: World, how_many: str) -> None:
    """Each job continues what the one before it left, as after a restart."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        kill_often(world, Path(folder), how_many)


def kill_often(world: World, store: Path, how_many: str) -> None:
    draw = random.Random(how_many)
    layout = Job(store=str(store), job="first", iterations=[0], line="root", keep=2)
    layout = replace(layout, stages=2, replicas=2, shard=True, scale=SCALE)
    assert world.run(layout) == [(0, "")] * 4
    start = time.monotonic()
    assert world.run(replace(layout, job="second", iterations=[1])) == [(0, "")] * 4
    whole_s = time.monotonic() - start
    last, outcomes = 1, set()
    for instant in range(25):
        job = replace(layout, job=f"job-{instant}", iterations=[last + 1])
        job = replace(job, background=instant % 2 == 0)
        pids = world.start(job)
        time.sleep(draw.uniform(0, whole_s))  # the instant is what is tried
        for pid in pids if how_many == "all" else [draw.choice(pids)]:
            with contextlib.suppress(ProcessLookupError):  # done before its instant
                os.kill(pid, signal.SIGKILL)
        world.finish()
        newest = expect_whole(store)[-1]
        assert newest in (last, last + 1)
        outcomes.add(newest - last)
        last = newest
    assert 0 in outcomes, "no instant fell into a save: the test tries nothing"
    assert world.run(replace(layout, job="end", iterations=[last + 1])) == [(0, "")] * 4
    assert expect_whole(store) == [last, last + 1]
    assert list_left(store) == {"owner.json", *(f"varuna_ckpt_{last + i}" for i in (0, 1))}


CALLS = ("mkdir", "openat", "write", "fsync", "rename", "unlinkat", "rmdir")


def can_trace() -> bool:
    if not shutil.which("strace"):
        return False
    return not subprocess.run(["strace", "-o", "/dev/null", "true"], check=False).returncode


@pytest.mark.skipif(not can_trace(), reason="needs strace, and leave to trace")
@pytest.mark.parametrize("call", CALLS)
def test_kill_9_before_each_system_call_that_changes_the_folder(world: World, call: str) -> None:
    """A save that replaces its iteration and removes an older one, cut off at its first such call,
    the second, and so on, until one ends undisturbed."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        store = Path(folder)
        job = Job(store=folder, job="first", iterations=[1, 2, 3], line="root", scale=SCALE)
        assert world.run(job) == [(0, "")]
        for instant in range(1, 200):
            job = replace(job, job=f"{call}-{instant}", iterations=[3], keep=2)
            job = replace(job, strace=f"{call}:signal=KILL:when={instant}")
            ((code, said),) = world.run(job)
            assert (code, said) in ((0, ""), (-signal.SIGKILL, ""))
            assert expect_whole(store)[-1] == 3
            if code == 0:
                break
        assert instant > 1 and expect_whole(store) == [2, 3]
        assert list_left(store) == {"owner.json", "varuna_ckpt_2", "varuna_ckpt_3"}


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_costs_the_save_and_nothing_else(small_disk: Path, background: bool) -> None:
    job = Job(store=str(small_disk), job="a", iterations=[], scale=SCALE)
    writer = CheckpointWriter(small_disk, job="a", background=background, keep=1)
    writer.save(make_part(job, 0, 1))
    writer.wait()
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), open(filler, "wb") as handle:
        handle.write(b"x" * (1 << 20))
        while True:
            handle.write(b"x" * 4096)
    for _ in range(3):
        with pytest.raises(CheckpointError, match=r"iteration 2 was not saved .*No space left"):
            writer.save(make_part(job, 0, 2))
            writer.wait()
        assert expect_whole(small_disk) == [1]
        assert len(list(small_disk.glob("varuna_ckpt*"))) == 1
    filler.unlink()
    writer.save(make_part(job, 0, 2))
    writer.close()
    assert expect_whole(small_disk) == [2]


def test_a_full_local_folder_is_an_error_and_not_a_crash(small_disk: Path, tmp_path: Path) -> None:
    job = Job(store="", job="a", iterations=[], scale=500)
    writer = CheckpointWriter(tmp_path / "store", job="a", tempdir=small_disk)
    with pytest.raises(NoRoom, match="No space left"):
        writer.save(make_part(job, 0, 1))
    writer.close()
    assert list(small_disk.iterdir()) == []


def test_a_rank_whose_save_was_taken_back_says_so(tmp_path: Path) -> None:
    """A missing file would lead astray: it was a full disk that made the other rank give up."""
    job = Job(store=str(tmp_path), job="a", iterations=[], stages=2)
    writer = CheckpointWriter(tmp_path, job="a", rank=0, world_size=2)
    part = make_part(job, 0, 1)

    def take_back() -> torch.Tensor:
        for path in tmp_path.glob("*.partial"):
            shutil.rmtree(path)
        return first.load()

    (index, (first, *rest)), *others = part.segments.items()
    segments = {index: [first._replace(load=take_back), *rest], **dict(others)}
    with pytest.raises(CheckpointError, match="rank 0, for another rank could not save"):
        writer.save(replace(part, segments=segments))


def test_a_rank_that_cannot_write_tells_the_others(tmp_path: Path) -> None:
    """The parts of the others are of no use without its own, and their space is wanted."""
    job = Job(store=str(tmp_path), job="a", iterations=[], stages=2)
    writers = [CheckpointWriter(tmp_path, job="a", rank=r, world_size=2) for r in range(2)]
    writers[0].save(make_part(job, 0, 1))
    part = make_part(job, 1, 1)
    unknown = part.segments[2][0]._replace(load=lambda: torch.empty(3))
    with pytest.raises(CheckpointError, match=r"not saved by rank 1: .* has changed its shape"):
        writers[1].save(replace(part, segments={2: [unknown]}))
    assert list(tmp_path.glob("varuna_ckpt*")) == []
    for rank, writer in enumerate(writers):
        writer.save(make_part(job, rank, 2))
    with CheckpointReader.open(tmp_path) as reader:
        expect_state(reader)

"""Calls of agents on the run folder while ranks train, counted by strace on real processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.commands.metadata import BOUND, TIMING, count_calls, find_obstacle, traced_run
from tests.varuna_core.agent.local_run import wait_until
from varuna_core.records.files import read_json

WINDOW_S = 12.0
BURST = 9
"""A beat, and a look with a listing, may fall into any window."""


def test_calls_on_the_run_folder_are_counted_and_no_others() -> None:
    trace = """\
7 openat(AT_FDCWD</>, "/run/1/attempt-0/state", O_RDONLY|O_DIRECTORY) = 5</run/1/attempt-0/state>
7 newfstatat(5</run/1/attempt-0/state>, ""..., {st_mode=S_IFDIR|0700, ...}, AT_EMPTY_PATH) = 0
8 rename("/run/1/beat/.0.part", "/run/1/beat/0.json" <unfinished ...>
7 getdents64(5</run/1/attempt-0/state>, 0x1 /* 3 entries */, 32768) = 80
8 <... rename resumed>)             = 0
7 openat(AT_FDCWD</>, "/proc/7/stat", O_RDONLY|O_CLOEXEC) = 6</proc/7/stat>
7 fsync(5</run/1/beat/.0.part>) = 0
"""
    found = count_calls(trace, Path("/run/1"))
    assert found == {"openat": 1, "newfstatat": 1, "rename": 1, "getdents64": 1, "fsync": 1}


@pytest.mark.skipif(find_obstacle() is not None, reason=f"{find_obstacle()}")
@pytest.mark.parametrize(
    "morphs",
    [pytest.param(False, id="fixed"), pytest.param(True, id="morphs", marks=pytest.mark.long)],
)
def test_agents_make_few_calls_while_ranks_train(morphs: bool) -> None:
    """Looks four times a second, as before, are 500 calls a node in this time."""
    with traced_run(2, morphs=morphs) as run:
        beats = [run.run.attempt(0).beat(node) for node in range(run.nodes)]
        wait_until(
            lambda: all(
                (read_json(path) or {}).get("every_s", 0) > TIMING.beat_s for path in beats
            ),
            "beats that say that there is a connection",
        )
        begun = time.monotonic()
        found = run.count(WINDOW_S)
        elapsed_s = time.monotonic() - begun
    assert found.num_metadata / run.nodes <= BOUND * elapsed_s / 60 + BURST, found.calls

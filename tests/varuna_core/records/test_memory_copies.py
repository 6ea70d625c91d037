"""Which copies in the memory of nodes are whole, held against trying all of them."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.records import memory_copies
from varuna_core.records.memory_copies import (
    SHARES,
    Share,
    find_room,
    find_whole,
    list_copies,
    list_held,
    list_shares,
    name_share,
    pick_holders,
)

NUMBERS = [(5, 0, 1, 2), (10, 0, 2, 2), (10, 1, 1, 3), (9, 2, 1, 1), (100, 0, 9, 4)]
"""Iteration, attempt, number and shares."""
COPIES = {f"varuna_ckpt_{i}.{a}.{n}.partial": count for i, a, n, count in NUMBERS}
WORDS = [f"{name}/{index}-of-{count}" for name, count in COPIES.items() for index in range(count)]
ODD = ["", "varuna_ckpt_900", "varuna_ckpt_900.0.1.partial/x-of-1", "../varuna_ckpt_1/0-of-1"]
HELD = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.sampled_from(WORDS + ODD), max_size=12)
)


def is_whole(name: str, count: int, words: set[str]) -> bool:
    return all(f"{name}/{index}-of-{count}" in words for index in range(count))


@given(HELD)
def test_the_newest_copy_is_found_of_which_nothing_is_missing(held: dict[str, list[str]]) -> None:
    together = {word for words in held.values() for word in words}
    order = [(10, "1"), (10, "0"), (9, "2"), (5, "0"), (100, "0")]
    whole = [name for name, count in COPIES.items() if is_whole(name, count, together)]

    def age(name: str) -> tuple[int, str]:
        _, iteration, attempt, *_ = name.replace(".", "_").replace("ckpt_", "").split("_")
        assert (int(iteration), attempt) in order
        return int(iteration), attempt

    found = find_whole(held)
    assert (None if found is None else found.name) == max(whole, key=age, default=None)
    if found is not None:
        assert found.iteration == age(found.name)[0]
        has_any = [node for node in held if any(w.startswith(found.name) for w in held[node])]
        assert found.holders == tuple(sorted(has_any))


@given(HELD)
def test_the_nodes_that_are_picked_hold_it_and_are_few(held: dict[str, list[str]]) -> None:
    picked, found = pick_holders(held), find_whole(held)
    if found is None:
        assert picked == ()
        return
    assert find_whole({node: held[node] for node in picked}) == find_whole(
        {node: [w for w in held[node] if w.startswith(found.name)] for node in picked}
    )
    count = COPIES[found.name]
    fewest = next(
        size
        for size in range(1, len(held) + 1)
        for some in combinations(held, size)
        if is_whole(found.name, count, {word for node in some for word in held[node]})
    )
    assert fewest <= len(picked) <= count and len(picked) <= fewest + 1  # of up to four shares


def lay(home: Path, copy: str, *shares: Share) -> None:
    folder = home / copy / SHARES
    folder.mkdir(parents=True)
    for share in shares:
        (folder / name_share(share)).touch()


def test_a_node_tells_what_was_laid_to_its_end(tmp_path: Path) -> None:
    first, second = "varuna_ckpt_40.3.1.partial", "varuna_ckpt_45.3.2.partial"
    lay(tmp_path, first, Share(1, 2, 7), Share(1, 2, 5), Share(0, 2, 4))
    (tmp_path / second / "markers").mkdir(parents=True)
    (tmp_path / "varuna_ckpt_40").mkdir()  # put together for a load
    assert list_copies(tmp_path) == [first, second]
    assert list_shares(tmp_path, first) == [Share(0, 2, 4), Share(1, 2, 5), Share(1, 2, 7)]
    assert list_held(tmp_path) == (f"{first}/0-of-2", f"{first}/1-of-2")
    assert list_held(tmp_path / "gone") == ()
    assert find_room(tmp_path) > 0


def test_the_room_is_the_least_of_disk_memory_and_the_jobs_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 3000 kB\n")
    disk = SimpleNamespace(f_bavail=1000, f_frsize=4096)
    limits = [4_000_000]
    monkeypatch.setattr(memory_copies, "open", lambda *_, **__: meminfo.open(), raising=False)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    monkeypatch.setattr(memory_copies, "_find_limits", lambda: limits)
    assert find_room(tmp_path) == 3000 * 1024
    limits.append(1_000_000)
    assert find_room(tmp_path) == 1_000_000
    disk.f_bavail = 100
    assert find_room(tmp_path) == 409_600

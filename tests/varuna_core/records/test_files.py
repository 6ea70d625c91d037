"""What the readers and writers of records refuse, and what they say of a disk."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from varuna_core.records import files
from varuna_core.records.files import (
    as_number,
    describe_room,
    expect_types,
    find_errno,
    lock_file,
    read_bytes,
)


@dataclass
class Read:
    count: int = 1
    seconds: float = 0.5
    name: Optional[str] = None  # noqa: UP045 - as records for Python 3.8 have it
    word: str | None = None
    ranks: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    sizes: dict[str, float] = field(default_factory=dict)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"count": -3}, {"seconds": 2}, {"name": "a"}, {"word": "b"}, {"ranks": [1, 2]},
        {"ranks": (1,)}, {"pair": [1, "a"]}, {"sizes": {"a": 1}},
    ],
)  # fmt: skip
def test_fields_of_the_kind_that_they_say_are_taken(fields: dict[str, Any]) -> None:
    one = Read(**fields)
    assert expect_types(one) is one


@pytest.mark.parametrize(
    "fields",
    [
        {"count": True}, {"count": 1.5}, {"count": "1"}, {"count": 2**63}, {"count": None},
        {"seconds": False}, {"seconds": "0.5"}, {"seconds": float("inf")},
        {"seconds": float("nan")}, {"name": 1}, {"word": 1}, {"ranks": ["a"]}, {"ranks": 1},
        {"ranks": [True]}, {"pair": [1]}, {"pair": ["a", 1]}, {"sizes": {1: 1.0}},
        {"sizes": {"a": "b"}},
        {"sizes": [1]},
    ],
)  # fmt: skip
def test_fields_of_another_kind_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(fields))):
        expect_types(Read(**fields))


def test_a_number_is_no_truth_value_and_no_text() -> None:
    assert [as_number(value) for value in (2, 0.5, True, "2", None, 1e30)] == [
        2.0, 0.5, None, None, None, None,
    ]  # fmt: skip


def test_the_room_of_a_disk_is_told_and_that_it_takes_no_more_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(f_bavail=500_000, f_frsize=4096, f_files=100, f_favail=7)

    def look(place: Path) -> SimpleNamespace:
        if Path(place) != tmp_path:
            raise FileNotFoundError(place)
        return facts

    monkeypatch.setattr(os, "statvfs", look)
    assert describe_room(tmp_path / "not/made") == "2.0 GB free"
    facts.f_bavail = 100
    assert describe_room(tmp_path) == "0.4 MB free"
    facts.f_favail = 0
    assert describe_room(tmp_path) == "0.4 MB free and no inodes"
    facts.f_files = 0  # a file system that has no count of them
    assert describe_room(tmp_path) == "0.4 MB free"
    monkeypatch.setattr(os, "statvfs", lambda place: (_ for _ in ()).throw(OSError("no answer")))
    assert describe_room(tmp_path) == ""


def test_a_link_of_this_user_is_followed_and_one_of_another_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"text"
    monkeypatch.setattr(files, "is_foreign_link", lambda path: True)
    assert read_bytes(tmp_path / "file") == b"text"
    with pytest.raises(OSError):
        read_bytes(tmp_path / "link")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_regular_files_are_read(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "other")
    with pytest.raises(OSError):
        read_bytes(tmp_path / "other")


def test_a_file_that_cannot_be_written_is_named_and_not_its_temporary_one(tmp_path: Path) -> None:
    with pytest.raises(OSError) as failed:
        files.write_atomic(tmp_path / "none/page.html", "x")
    assert failed.value.filename == str(tmp_path / "none/page.html")


def test_a_lock_makes_its_file_and_is_one_holders(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lock_file(path) as held:
        assert held and path.exists() and path.stat().st_mode & 0o077 == 0
        with lock_file(path, waits=False) as again:
            assert not again
    with lock_file(path, waits=False) as later:
        assert later
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="link"), lock_file(tmp_path / "link"):
        pass


def test_the_number_of_an_error_is_that_of_what_it_came_from() -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("not saved") from error
    except RuntimeError as error:
        assert find_errno(error) == 28
    assert find_errno(ValueError("other")) == 0

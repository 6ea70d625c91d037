"""Readers of what others wrote: bounds of bytes, names and digits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from varuna_core.records.files import as_whole, list_files, read_bytes, read_json, walk_files


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), ("007", 7), ("", None), ("-1", None), ("\xb2", None), ("\u0663", None),
     ("9" * 18, 10**18 - 1), ("9" * 19, None), ("9" * 5000, None)],
)  # fmt: skip
def test_a_number_has_few_digits(text: str, number: int | None) -> None:
    assert as_whole(text) == number


def test_a_file_is_read_up_to_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 10)
    assert read_bytes(path, 10) == b"x" * 10
    with pytest.raises(OSError, match="File too large"):
        read_bytes(path, 9)
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match="File too large"):
        read_bytes(path)
    assert b"cpu" in read_bytes(Path("/proc/stat"))  # its size is 0


def test_no_pipe_and_no_link_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a").write_text("{}")
    (tmp_path / "link").symlink_to("a")
    assert read_json(tmp_path / "pipe") is None
    assert read_json(tmp_path / "link") == {}
    with pytest.raises(OSError):
        read_bytes(tmp_path / "link", follows=False)


def test_a_folder_is_walked_for_so_many_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("a", "b/c", "b/d"):
        (tmp_path / name).touch()
    (tmp_path / "b/up").symlink_to("..")
    names = [str(path.relative_to(tmp_path)) for path in walk_files(tmp_path, 99)]
    assert names == ["a", "b", "b/c", "b/d", "b/up"]
    assert len(list(walk_files(tmp_path, 2))) == 2
    assert list_files(tmp_path / "none") == []

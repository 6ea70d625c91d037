"""Readers of what others wrote: bounds of bytes, names and digits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from varuna_core.records.files import as_whole, list_files, read_bytes, read_json


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


def test_a_folder_that_is_missing_has_no_files(tmp_path: Path) -> None:
    assert list_files(tmp_path / "none") == []

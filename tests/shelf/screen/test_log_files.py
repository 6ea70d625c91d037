"""The lines for the log pane, from real files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vjob.shelf.screen import log_files
from vjob.shelf.screen.log_files import LogFiles


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def append(path: Path, *lines: str) -> None:
    with path.open("a") as handle:
        handle.write("".join(f"{line}\n" for line in lines))


def test_a_node_begins_with_its_last_lines_and_goes_on_with_new_ones(tmp_path: Path) -> None:
    append(tmp_path / "n1.out", *(f"3: line {number}" for number in range(1000)))
    append(tmp_path / "n1.err", "7: CUDA out of memory")
    lines = LogFiles(lambda: tmp_path, lambda text: "oom" if "memory" in text else "")
    first = lines.read_new("n1")
    assert 100 < len(first) < 1000
    out = [line for line in first if line.file == "n1.out"]
    assert (out[-1].text, out[-1].rank, out[-1].node) == ("line 999", 3, "n1")
    (err,) = (line for line in first if line.file == "n1.err")
    assert (err.kind, err.rank) == ("oom", 7)
    assert lines.read_new("n1") == []
    append(tmp_path / "n1.out", "no tag")
    (new,) = lines.read_new("n1")
    assert (new.text, new.rank) == ("no tag", None)


def test_another_node_begins_anew_and_so_does_another_attempt(tmp_path: Path) -> None:
    folders = [tmp_path / "attempt-0", tmp_path / "attempt-1"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        append(folder / "n1.out", f"a{number}")
        append(folder / "n2.out", f"b{number}")
    now = [folders[0]]
    lines = LogFiles(lambda: now[0])
    texts = []
    for node in ("n1", "n2", "n1", None):
        texts.append([line.text for line in lines.read_new(node)])
    now[0] = folders[1]
    texts.append([line.text for line in lines.read_new(None)])
    assert texts == [["a0"], ["b0"], ["a0"], ["a0", "b0"], ["a1", "b1"]]


def test_files_that_come_later_are_found(tmp_path: Path) -> None:
    clock = Clock()
    append(tmp_path / "n1.out", "a")
    append(tmp_path / "n1.gpu", "0, 98 %")
    lines = LogFiles(lambda: tmp_path, clock=clock)
    assert [line.text for line in lines.read_new(None)] == ["a"]
    append(tmp_path / "n2.out", "b")
    assert lines.read_new(None) == []
    clock.now = log_files.LIST_S + 1
    assert [line.text for line in lines.read_new(None)] == ["b"]


def test_thousands_of_files_are_looked_at_in_turns(tmp_path: Path) -> None:
    number = log_files.FILES_A_LOOK + 7
    for index in range(number):
        append(tmp_path / f"n{index:05d}.out", "old", f"of {index}")
    lines = LogFiles(lambda: tmp_path)
    first, second = lines.read_new(None), lines.read_new(None)
    assert len(first) == log_files.FILES_A_LOOK
    assert len({line.text for line in first + second}) == number


def test_no_folder_and_no_file_are_no_lines(tmp_path: Path) -> None:
    assert LogFiles(lambda: None).read_new(None) == []
    assert LogFiles(lambda: tmp_path).read_new("n1") == []


def test_escapes_are_made_visible(tmp_path: Path) -> None:
    append(tmp_path / "n1.out", "\x1b]0;title\x07")
    (line,) = LogFiles(lambda: tmp_path).read_new("n1")
    assert line.text == "\\x1b]0;title\\x07"

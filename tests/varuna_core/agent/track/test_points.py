"""Points of an attempt are the same however often its reader is replaced by another."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.varuna_core.agent.local_run import make_plan
from varuna_core.agent.track import points
from varuna_core.agent.track.points import AttemptPoints, Point, count_values
from varuna_core.records.files import write_json
from varuna_core.records.logs.times import MarkReader, format_mark, parse_marks
from varuna_core.records.runfolder import RunFolder

OUT = st.sampled_from(
    ["step {}/90 loss 0.5\n", "0: step {} loss 2\n", "validation loss 3\n", "saved", "words\n"]
)
ERR = st.sampled_from([" 10%|#| {}/90 [00:10<00:50, 1.00it/s, loss=1.5]\r", "\n", "oops\n"])
LOOK = st.tuples(st.lists(OUT, max_size=4), st.lists(ERR, max_size=3), st.booleans())


class Growing:
    """An attempt on one node, whose files grow."""

    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(folder)
        self.attempt = self.run.attempt(0)
        report = self.attempt.node_report(0)
        report.parent.mkdir(parents=True)
        write_json(report, {"host": "n0"}, lasts=False)
        self._sizes = {"out": 0, "err": 0}
        self._now, self._step = 100.0, 0

    def reader(self, saved: object = None) -> AttemptPoints:
        text = json.loads(json.dumps(saved))
        return AttemptPoints(self.run, make_plan(), self.attempt, 1.0, is_last=True, saved=text)

    def grow(self, out: list[str], err: list[str], has_sample: bool) -> None:
        self._now += 1
        self._append("times", format_mark(self._now, self._sizes["out"], self._sizes["err"]))
        for kind, lines in (("out", out), ("err", err)):
            for line in lines:
                self._step += "{}" in line
                self._append(kind, line.format(self._step).encode())
        if has_sample:
            gpus = [{"index": 0, "utilization": 50}]
            sample = {"time": self._now, "cpu_percent": 1.0, "gpus": gpus}
            self._append("gpu.jsonl", json.dumps(sample).encode() + b"\n")
            event = {"time": self._now + 0.5, "kind": "verdict", "health": "HEALTHY"}
            with self.run.events().open("a") as events:
                events.write(json.dumps(event) + "\n")

    def _append(self, kind: str, data: bytes) -> None:
        path = self.attempt.node_log("n0", kind)
        with path.open("ab") as log:
            log.write(data)
        if kind in self._sizes:
            self._sizes[kind] += len(data)


def read_all(reader: AttemptPoints, *, final: bool = False) -> list[Point]:
    found: list[Point] = []
    is_all = False
    while not is_all:
        piece, is_all = reader.read(final=final)
        assert sum(map(count_values, piece[:-1])) < points.PIECE
        found += piece
    return found


@settings(max_examples=40, deadline=None)
@given(looks=st.lists(LOOK, min_size=1, max_size=6))
def test_a_reader_that_goes_on_where_another_one_was_finds_the_same(
    tmp_path_factory: pytest.TempPathFactory, looks: list[tuple[list[str], list[str], bool]]
) -> None:
    with patch.object(points, "PIECE", 3), patch.object(points.time, "time", lambda: 1e9):
        growing = Growing(tmp_path_factory.mktemp("run"))
        same = growing.reader()
        saved: object = None
        for number, look in enumerate(looks):
            growing.grow(*look)
            final = number == len(looks) - 1
            other = growing.reader(saved)
            assert read_all(other, final=final) == read_all(same, final=final)
            saved = other.save()
        assert read_all(growing.reader(saved), final=True) == []


def test_samples_of_an_attempt_that_is_over_have_the_step_of_their_moment(tmp_path: Path) -> None:
    growing = Growing(tmp_path)
    for _ in range(3):
        growing.grow(["step {}/90 loss 0.5\n"], [], True)
    found = read_all(growing.reader(), final=True)
    assert [one.step for one in found if one.stream == "samples n0"] in ([0, 1, 2], [1, 2, 3])


def test_what_several_ranks_print_alike_counts_once(tmp_path: Path) -> None:
    """And what another rank adds to a step is there too."""
    growing = Growing(tmp_path)
    for step in (1, 2):
        lines = [f"{rank}: step {step}/90 loss 0.5\n" for rank in (0, 1, 2)]
        growing.grow([*lines, f"3: step {step}/90 loss 0.5 grad_norm: 2.0\n"], [], False)
        growing.grow([f"{rank}: validation loss at iteration {step} | lm loss value: 3.0E+00 |\n"
                      for rank in (0, 1)], [], False)  # fmt: skip
    found = read_all(growing.reader(), final=True)
    for name, value in (("loss", 0.5), ("grad_norm", 2.0), ("validation/lm loss", 3.0)):
        told = [(one.step, one.values[name]) for one in found if name in one.values]
        assert told == [(1, value), (2, value)], name


@settings(max_examples=60, deadline=None)
@given(
    marks=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=12),
    looks=st.lists(st.integers(0, 12), max_size=4),
)
def test_marks_of_a_file_that_grows_are_those_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, marks: list[tuple[int, int]], looks: list[int]
) -> None:
    """Each look asks for what was written by then, by one reader and by its successors."""
    path = tmp_path_factory.mktemp("marks") / "n0.times"
    places = [0]
    for length, _ in marks:
        places.append(places[-1] + length)
    follower = MarkReader(path, is_err=False)
    written = asked = 0
    for end in [*sorted(look for look in looks if look <= len(marks)), len(marks)]:
        with path.open("ab") as handle:
            for at in range(written, end):
                handle.write(format_mark(100.0 + at, places[at], 0) + b"torn\n" * marks[at][1])
        written = end
        successor = MarkReader(path, is_err=False, state=json.loads(json.dumps(follower.save())))
        follower.look()
        whole = parse_marks(path.read_bytes())[0]
        for place in range(places[end] + 1):
            wanted = whole.find_exact(place)
            if place >= asked:
                assert follower.find_exact(place) == wanted
                assert successor.find_exact(place) == wanted
        asked = places[end]


def test_marks_that_moved_are_found_again(tmp_path: Path) -> None:
    """A log was cut in its middle: another file of marks stands in the place of this one."""
    path = tmp_path / "n0.times"
    path.write_bytes(format_mark(100.0, 0, 0) + format_mark(101.0, 5000, 0))
    follower = MarkReader(path, is_err=False)
    assert follower.find_exact(6000)[0] == 101.0
    (tmp_path / "part").write_bytes(format_mark(100.0, 0, 0) + format_mark(102.0, 900, 0))
    (tmp_path / "part").replace(path)
    follower.look()
    assert follower.find_exact(950)[0] == 102.0


def test_a_mark_that_was_read_ahead_does_not_stop_the_clock_of_a_log_that_was_cut(
    tmp_path: Path,
) -> None:
    """The other log went on alone: the last mark of this one is beyond its last line."""
    path = tmp_path / "n0.times"
    marks = [(100.0, 0, 0), (101.0, 5000, 0), (102.0, 6000, 70)]
    path.write_bytes(b"".join(format_mark(*mark) for mark in marks))
    follower = MarkReader(path, is_err=False)
    assert follower.find_exact(5500)[0] == 101.0
    moved = [(100.0, 0, 0), (102.0, 900, 70), (103.0, 950, 70)]
    (tmp_path / "part").write_bytes(b"".join(format_mark(*mark) for mark in moved))
    (tmp_path / "part").replace(path)
    follower.look()
    assert follower.find_exact(900) == (102.0, 0.0)
    assert follower.find_exact(950) == (103.0, 0.0)

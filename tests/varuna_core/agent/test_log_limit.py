"""Logs that outgrow `cluster.log_limit_mb`: their beginnings and newest lines stay."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.jobs.confs import make_conf, make_plan
from varuna_core.agent.processes import output
from varuna_core.agent.processes.output import Pump, cut_middle
from varuna_core.records.logs.tail import Follower
from varuna_core.records.logs.times import CUT_NOTE, Cut, count_left_out, parse_marks
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from vjob.jobs.monitor.log_lines.stream import Log
from vjob.reports.load.tables import load_job

MB = 1 << 20
NOTE = re.compile(r"vjob: +(\d+) bytes are left out here \(cluster.log_limit_mb\)")


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    found = RunFolder(tmp_path).attempt(0)
    found.make()
    return found


def pump_lines(attempt: AttemptFolder, count: int, limit_mb: int) -> int:
    """Write numbered lines through a pump; the bytes of all of them with their tags."""
    pipes = [os.pipe() for _ in range(2)]
    pump = Pump(attempt, "n0", limit_mb)
    pump.add(3, pipes[0][0], pipes[1][0])
    pump.start()
    size = 0
    for number in range(count):
        line = b"iteration %7d/ 99 | lm loss: 1.0E+00 | %s\n" % (number, b"x" * (number % 400))
        os.write(pipes[0][1], line)
        size += len(line) + 3
    for _, end in pipes:
        os.close(end)
    pump.join(60)
    assert not pump.is_alive()
    return size


def test_the_beginning_and_the_newest_lines_of_a_long_log_stay(attempt: AttemptFolder) -> None:
    path = attempt.node_log("n0", "out")
    size = pump_lines(attempt, 30_000, 2)
    assert size > 5 * MB and path.stat().st_size <= MB + output.LINE_BYTES
    assert path.stat().st_size > 700_000
    lines = path.read_text().splitlines()
    (at,) = [at for at, line in enumerate(lines) if NOTE.fullmatch(line)]
    left_out = int(NOTE.fullmatch(lines[at])[1])  # type: ignore[index]
    note = len(CUT_NOTE % 0)
    assert path.stat().st_size - note + left_out == size
    numbers = [int(line.split()[2].rstrip("/")) for line in lines if not NOTE.fullmatch(line)]
    assert numbers[:at] == list(range(at)) and sum(map(len, lines[:at])) > 400_000
    rest = numbers[at:]
    assert rest == list(range(rest[0], 30_000)) and len(rest) > 500
    assert count_left_out(path.read_bytes()) == left_out


def test_times_of_writing_move_with_the_lines(attempt: AttemptFolder) -> None:
    begun = time.time()
    pump_lines(attempt, 30_000, 1)
    path = attempt.node_log("n0", "out")
    marks, _ = parse_marks(attempt.node_log("n0", "times").read_bytes())
    assert list(marks.offsets) == sorted(marks.offsets)
    assert marks.offsets[-1] <= path.stat().st_size
    times = [line.at for line in Log(path, "n0").read(final=True)]
    assert times == sorted(times, key=float) and times[0] == pytest.approx(begun, abs=60)
    assert times[-1] == marks.times[-1]


def test_without_a_limit_all_stays(attempt: AttemptFolder) -> None:
    path = attempt.node_log("n0", "out")
    pipes = [os.pipe() for _ in range(2)]
    pump = Pump(attempt, "n0")
    pump.add(0, pipes[0][0], pipes[1][0])
    pump.start()
    for _ in range(50):
        os.write(pipes[0][1], b"y" * 65535 + b"\n")
    for _, end in pipes:
        os.close(end)
    pump.join(60)
    assert path.stat().st_size == 50 * (65536 + 3)


def test_a_log_that_cannot_be_cut_grows_on(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(output, "cut_middle", fail)
    size = pump_lines(attempt, 10_000, 1)
    assert attempt.node_log("n0", "out").stat().st_size == size


@pytest.mark.parametrize("regrows", [False, True])
def test_whoever_follows_a_log_that_is_cut_sees_each_line_once(
    tmp_path: Path, regrows: bool
) -> None:
    path = tmp_path / "n0.out"
    follower, number, cut = Follower(path), 0, None
    seen: list[str] = []

    def write(count: int) -> None:
        nonlocal number
        with path.open("ab") as handle:
            handle.write(b"".join(b"%08d\n" % at for at in range(number, number + count)))
        number += count

    for _ in range(4):
        write(30_000)
        seen += follower.read()
        write(1_000)
        found = cut_middle(path, path.stat().st_size, 200_000, cut)
        cut = found or cut
        write(60_000 if regrows else 10)
        seen += follower.read()
    told = [int(line) for line in seen if not NOTE.fullmatch(line)]
    assert told == list(range(number))


def test_cutting_again_counts_all_that_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "n0.out"
    written, cut = 0, None
    for turn in range(6):
        data = b"".join(b"%02d %06d\n" % (turn, number) for number in range(40_000))
        with path.open("ab") as handle:
            handle.write(data)
        written += len(data)
        found = cut_middle(path, path.stat().st_size, 400_000, cut)
        assert found is not None
        cut = found
        text = path.read_bytes()
        assert len(text) == written - cut.num_bytes + len(CUT_NOTE % 0)
        assert count_left_out(text) == cut.num_bytes and text.count(b"left out here") == 1
        assert text.endswith(data[-90_000:]) and text.startswith(b"00 000000\n")
    assert (
        cut is not None and cut.move(cut.begin) == cut.end and cut.move(cut.begin - 1) == cut.place
    )


def test_a_mark_between_stands_at_the_line_that_says_so() -> None:
    cut = Cut(place=100, begin=500, end=160, num_bytes=400)
    assert [cut.move(place) for place in (0, 100, 300, 500, 501)] == [0, 100, 100, 160, 161]


def test_the_limit_is_the_confs() -> None:
    for text, limit_mb in (("", 1024), ("log_limit_mb: 7, ", 7), ("log_limit_mb: 0, ", None)):
        conf = (
            "name: x\nprogram: {script: x.py}\ncluster: {%sscheduler: local, nodes: [{group: a}]}"
        )
        assert make_plan(make_conf(conf % text)).log_limit_mb == limit_mb


def test_the_report_says_that_a_log_was_cut(attempt: AttemptFolder) -> None:
    pump_lines(attempt, 30_000, 1)
    job = load_job(attempt.path.parent)
    assert "bytes were not written to the log (cluster.log_limit_mb)" in job.skipped["0/n0.out"]
    assert not job.logs["iterations"].empty

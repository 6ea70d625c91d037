"""Lines of many logs as one stream."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from varuna_core.records.logs.times import format_mark
from vjob.jobs.monitor.log_lines.stream import (
    MOST_HELD,
    Log,
    LogLine,
    collapse,
    merge_lines,
    split_tag,
)


def line(at: float | None, rank: int | None, text: str, label: str = "n0") -> LogLine:
    return LogLine(at=at, label=label, is_err=False, rank=rank, text=text)


LINES = st.lists(
    st.builds(
        line,
        st.floats(0, 20),
        st.none() | st.integers(0, 5),
        st.sampled_from(["loading", "step 1", "done"]),
        st.sampled_from(["n0", "n1"]),
    ),
    max_size=40,
)


@given(LINES)
def test_no_line_is_lost_or_told_twice(lines: list[LogLine]) -> None:
    ordered = sorted(lines, key=lambda item: item.at or 0)
    groups = list(collapse(ordered))
    assert sum(max(1, len(group.ranks)) for group in groups) == len(lines)
    assert [group.first.at for group in groups] == sorted(group.first.at or 0 for group in groups)
    for text in {item.text for item in lines}:
        said = sorted(item.rank for item in lines if item.text == text and item.rank is not None)
        told = [rank for group in groups if group.first.text == text for rank in group.ranks]
        assert sorted(told) == said


@given(st.lists(LINES, max_size=4))
def test_a_merge_rises_in_time_and_keeps_the_order_within_each_file(
    files: list[list[LogLine]],
) -> None:
    named = [
        [line(item.at, at, str(place)) for place, item in enumerate(lines)]
        for at, lines in enumerate(files)
    ]
    merged = list(merge_lines(named))
    times = [item.at or 0 for item in merged]
    assert times == sorted(times)
    for at, lines in enumerate(named):
        assert [item.text for item in merged if item.rank == at] == [item.text for item in lines]


def test_what_all_ranks_print_stands_once() -> None:
    lines = [line(100 + rank / 100, rank, "loading", f"n{rank // 4}") for rank in range(64)]
    lines.insert(5, line(100.04, 4, "slow disk", "n1"))
    said = [group.render(64) for group in collapse(lines)]
    assert said == ["x64 all ranks | loading", "n1 | 4: slow disk"]


def test_the_same_line_of_one_rank_again_is_another_line() -> None:
    lines = [line(1, rank, "retry") for rank in (0, 1, 0)]
    assert [group.render(9) for group in collapse(lines)] == [
        "x2 ranks 0-1 | retry",
        "n0 | 0: retry",
    ]


def test_equal_lines_that_are_far_apart_stay_apart() -> None:
    lines = [line(1, 0, "step"), line(9, 1, "step")]
    assert len(list(collapse(lines))) == 2


def test_lines_without_times_are_held_in_bounded_number() -> None:
    lines = [line(None, 0, "a"), *(line(None, 0, str(n)) for n in range(2 * MOST_HELD))]
    groups = list(collapse([*lines, line(None, 1, "a")]))
    assert len(groups) == len(lines) + 1
    near = list(collapse([line(None, 0, "a"), line(None, 0, "b"), line(None, 1, "a")]))
    assert [group.render() for group in near] == ["x2 ranks 0-1 | a", "n0 | 0: b"]


def test_two_nodes_merge_by_their_marks_on_the_file_servers_clock(tmp_path: Path) -> None:
    first, second = tmp_path / "a.example.com.out", tmp_path / "b.err"
    first.write_bytes(b"0: one\n0: three\n")
    first.with_suffix(".times").write_bytes(format_mark(100, 0, 0) + format_mark(103, 7, 0))
    second.write_bytes(b"1: two\n1: four\n")
    second.with_suffix(".times").write_bytes(format_mark(51, 0, 0) + format_mark(54, 0, 7))
    logs = [Log(first, "a"), Log(second, "b", clock_offset_s=50.0)]
    merged = [item.render() for item in merge_lines(log.read(final=True) for log in logs)]
    assert merged == ["a | 0: one", "b err | 1: two", "a | 0: three", "b err | 1: four"]


def test_a_growing_log_gives_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "n.out"
    log = Log(path, "n")
    said = []
    for piece in (b"0: a", b"b\n0: c\n", b"1: d"):
        with path.open("ab") as handle:
            handle.write(piece)
        said.append([item.text for item in log.read()])
    assert said == [[], ["ab", "c"], []]
    assert [item.text for item in log.read(final=True)] == ["d"]


def test_a_tag_is_a_number_and_a_colon() -> None:
    assert split_tag("12: loss: 3") == (12, "loss: 3")
    assert split_tag("12:30 o'clock") == (None, "12:30 o'clock")
    assert split_tag("vjob: 5 bytes are missing here") == (
        None,
        "vjob: 5 bytes are missing here",
    )

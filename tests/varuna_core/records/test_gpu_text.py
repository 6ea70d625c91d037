"""Samples of GPUs as text: what the agent writes comes back, and gpustat's own lines are read."""

from __future__ import annotations

from typing import Any

import pytest

from varuna_core.records.logs.gpu_text import (
    find_lines,
    format_line,
    is_heading,
    parse_heading,
    parse_line,
    read_index,
    read_utilization,
)

READING: dict[str, Any] = {
    "index": 0,
    "name": "NVIDIA A10",
    "temperature": 49.0,
    "utilization": None,
    "memory_used_mb": 20.0,
    "memory_total_mb": 22731.0,
}


@pytest.mark.parametrize("index", [0, 15, "cpu"])
def test_a_line_comes_back(index: object) -> None:
    text = format_line({**READING, "index": index})
    found = parse_line(text)
    assert found is not None and found.index == str(index)
    for name in set(READING) - {"index"}:
        assert getattr(found, name) == READING[name]
    (match,) = find_lines(text)
    assert (read_index(match), read_utilization(match)) == (str(index), None)


def test_gpustats_users_are_counted_and_its_headings_tell_the_time() -> None:
    found = parse_line("[1] NVIDIA A10 | 49'C, 100 % | 900 / 22731 MB | me(500M) you(400M)")
    assert found is not None and found.num_processes == 2
    heading = "n061  Thu Jun  1 16:08:12 2023  535.54.03"
    later = heading.replace("16:08:12", "16:08:13")
    assert is_heading(heading) and not is_heading("[1] NVIDIA A10")
    assert parse_heading(later) == (parse_heading(heading) or 0.0) + 1
    assert is_heading(heading.replace("Jun", "Xyz"))
    assert parse_heading(heading.replace("Jun", "Xyz")) is None

"""A stage of a model that does not fit into memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.limited_stage import BLOCKS, VOCAB, WIDTH
from tests.ranks.start import ROOT


def write_zeros(path: Path) -> None:
    """The model's weights, as a file of holes."""
    shapes = {f"blocks.{i}.weight": [WIDTH, WIDTH] for i in range(BLOCKS)}
    shapes["embed.weight"] = [VOCAB, WIDTH]
    header, end = {}, 0
    for name, (rows, columns) in shapes.items():
        begin, end = end, end + rows * columns * 4
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)


@pytest.mark.parametrize(("index", "source"), [(0, "seed"), (1, "seed"), (3, "file")])
def test_no_more_than_the_stage_is_ever_allocated(tmp_path: Path, index: int, source: str) -> None:
    """In a process that may not hold the model."""
    words = [str(index)]
    if source == "file":
        write_zeros(tmp_path / "w.safetensors")
        words.append(str(tmp_path / "w.safetensors"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ranks.limited_stage", *words],
        # Large blocks go back to the system when freed, not into a heap with holes.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "the stage fits, the model does not\n", done.stderr

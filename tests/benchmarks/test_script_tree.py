"""The benchmark of a folder of scripts finds by itself what they start."""

from __future__ import annotations

from pathlib import Path

from benchmarks.launch_scripts import tree
from tests.shelf.importers.shell_conf_tree import SCRIPTS


def test_a_bash_with_stubs_records_the_program_of_rank_0(tmp_path: Path) -> None:
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    program, *words = tree.record_words(tmp_path)
    assert program == "_00_pretrain_gpt.py"
    assert words[:2] == ["--num-layers", "4"] and words[-2:] == ["--split", "100,0,0"]
    assert words[words.index("--balance") + 1] == "3-1"
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(SCRIPTS), "nothing is written"


def test_a_row_names_the_words_that_differ() -> None:
    row = tree.Row(
        model="T5", cluster="mixed", program="t5.py", truth=["--balance", "2-2"], conf=[],
        nodes="4 x a10:4", seconds=0.5, processor_s=0.25,
    )  # fmt: skip
    assert list(tree.render_rows([row]))[2] == (
        "| T5 | mixed | 4 x a10:4 | t5.py | 3 | missing --balance 2-2 | 0.50 | 0.25 |"
    )

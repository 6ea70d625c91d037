"""Which scripts of a folder a user starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shelf.importers.shell_conf_tree import SCRIPTS
from vjob.jobs.errors import InputError
from vjob.shelf.importers.tree import find_entries


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (SCRIPTS, ["_03_submit.sh", "get_result.sh"]),
        ({"a.sh": ". conf.sh", "conf.sh": "A=1"}, ["a.sh"]),
        ({"a.sh": "# see b.sh", "b.sh": "python t.py"}, ["a.sh", "b.sh"]),
        ({"a.sh": "bash b.sh", "b.sh": "bash a.sh"}, ["a.sh", "b.sh"]),
        ({"a.sh": "bash my-b.sh", "b.sh": ""}, ["a.sh", "b.sh"]),
        ({"x.slurm": "srun a.sh", "a.sh": "", "train.py": "a.sh"}, ["x.slurm"]),
    ],
)
def test_those_that_no_other_names(
    files: dict[str, str], wanted: list[str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert [path.name for path in find_entries(tmp_path)] == wanted
    assert find_entries(tmp_path / wanted[0]) == [tmp_path / wanted[0]]


def test_a_folder_without_scripts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(InputError, match="has no shell scripts"):
        find_entries(tmp_path)

"""Lines of DeepSpeed's launcher: its own options are nodes, or are told; what it starts is kept."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from vjob.shelf.importers.bash.recording import Word
from vjob.shelf.importers.launchers import FLAGS, split_options
from vjob.shelf.importers.translate import Source, translate_source


def convert_line(folder: Path, line: str) -> tuple[dict[str, Any], list[str]]:
    (folder / "train.py").touch()
    (folder / "x.sh").write_text(line)
    text, notes = translate_source(Source(path=folder / "x.sh"), {"HOME": "/home/kim"})
    return yaml.safe_load(text), notes


DEEPSPEED_HOSTS = "w0 slots=8\nw1 slots=8\nw2 slots=8\n"


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ("--num_gpus 4", [{"count": 1, "ranks": 4}]),
        ("--num_accelerators=4", [{"count": 1, "ranks": 4}]),
        ("--num_nodes 2 --num_gpus 4", [{"count": 2, "ranks": 4}]),
        ("-H hostfile", [{"count": 3, "gpus": 8, "ranks": 8}]),
        ("--hostfile=hostfile --num_nodes 2", [{"count": 2, "gpus": 8, "ranks": 8}]),
        ("-H hostfile -i w0@w1:0,2", [{"count": 1, "gpus": 8, "ranks": 8},
                                      {"count": 1, "gpus": 8, "ranks": 2, "devices": [0, 2]}]),
        ("-H hostfile -e w1", [{"count": 2, "gpus": 8, "ranks": 8}]),
        ("-H hostfile --exclude w2:0,7 -q",
         [{"count": 2, "gpus": 8, "ranks": 8},
          {"count": 1, "gpus": 8, "ranks": 6, "devices": [1, 2, 3, 4, 5, 6]}]),
        ("--include localhost:3", [{"count": 1, "gpus": 4, "ranks": 1, "devices": [3]}]),
        ("--num_gpus 2 --bind_cores_to_rank --bind_core_list 0-7 --elastic_training "
         "--min_elastic_nodes 1 --no_local_rank --no_ssh_check --ssh_port 22 --save_pid "
         "--launcher pdsh --launcher_args '-R ssh' --force_multi --enable_each_rank_log logs "
         "--master_addr w0 --node_rank 0 --log_level info --venv_script v.sh --quiet",
         [{"count": 1, "ranks": 2}]),
    ],
)  # fmt: skip
def test_options_of_deepspeeds_launcher_are_nodes_or_are_told(
    options: str, groups: list[dict[str, object]], tmp_path: Path
) -> None:
    (tmp_path / "hostfile").write_text(DEEPSPEED_HOSTS)
    conf, notes = convert_line(tmp_path, f"deepspeed {options} train.py --deepspeed")
    assert conf["program"] == {"deepspeed": "train.py", "args": ["--deepspeed"]}
    nodes = conf["cluster"]["nodes"]
    assert [{key: one[key] for key in group} for one, group in zip(nodes, groups, strict=True)] == (
        groups
    )
    assert not [note for note in notes if "vjob has no counterpart" in note]


@pytest.mark.parametrize("line", ["--module pkg.train --a 1", "--no_python ./run --a 1"])
def test_what_deepspeed_starts_without_a_script_is_a_command(line: str, tmp_path: Path) -> None:
    conf, _ = convert_line(tmp_path, f"deepspeed --num_gpus 2 {line}")
    assert conf["program"] == {"command": ["deepspeed", "--num_gpus", "2", *line.split()]}


def test_each_option_of_the_deepspeed_that_is_installed_has_its_value_or_none() -> None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("deepspeed is not installed")
    runner = Path(spec.submodule_search_locations[0], "launcher", "runner.py")
    for call in ast.walk(ast.parse(runner.read_text())):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("add_argument"):
            continue
        names = [one.value for one in call.args if isinstance(one, ast.Constant)]
        given = {one.arg: ast.unparse(one.value) for one in call.keywords}
        for name in (str(name) for name in names if str(name).startswith("-")):
            value = [] if given.get("action") == "'store_true'" else ["x"]
            words = [Word(one) for one in (name, *value, "script.name", "--lr")]
            [(found, word)], rest = split_options(words, FLAGS["deepspeed"])
            assert ([word.text] if word.text else [], rest[0].text) == (value, "script.name"), found

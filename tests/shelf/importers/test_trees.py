"""Folders of scripts in the form of a patched Megatron-LM's users, each with a trap for readers."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.command import Vjob
from tests.shelf.importers.shell_conf_tree import SCRIPTS

REDIRECTED = """\
if [ $PIPELINE_MP_SIZE > 9 ]; then
    CUT="--split-rank 1 --balance $PARTITION"
else
    CUT=""
fi
MODEL_ARGS="""
"""A comparison that is a redirection in bash, and so always true."""
UNIFORM = ("HOMOGENEOUS_CLUSTER=false", "HOMOGENEOUS_CLUSTER=true")


def write_tree(folder: Path, *changes: tuple[str, str]) -> Vjob:
    for name, text in {**SCRIPTS, "_00_pretrain_gpt.py": ""}.items():
        for old, new in changes:
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return Vjob(folder, {"HOME": "/home/kim", "USER": "kim"})


@pytest.mark.parametrize(
    ("changes", "words", "nodes"),
    [
        # the model's numbers, the partition and the profile's options come from three files
        ((), "--num-layers 4 --balance 3-1 --timing-log-option all", [("a100:2", 1), ("a10:2", 1)]),
        # the conf decides which job script is started
        ((UNIFORM,), "--lr-warmup-fraction .01 --split 100,0,0", [("a10:2", 2)]),
        # T5: no number of layers, and what looks like a comparison writes a file
        (
            (
                UNIFORM,
                ("--balance $PARTITION", "$CUT"),
                ("MODEL_ARGS=", REDIRECTED),
                ("--num-layers $NUM_LAYERS", "--encoder-num-layers $NUM_LAYERS"),
            ),
            "--encoder-num-layers 4 --split-rank 1 --balance 3-1",
            [("a10:2", 2)],
        ),
    ],
)
def test_a_tree_is_its_program_word_for_word(
    changes: tuple[tuple[str, str], ...],
    words: str,
    nodes: list[tuple[str, int]],
    tmp_path: Path,
) -> None:
    vjob = write_tree(tmp_path, *changes)
    made = vjob("init", "--from", ".")
    conf = yaml.safe_load(made.stdout)
    assert [(one["gpus"], one["count"]) for one in conf["cluster"]["nodes"]] == nodes
    assert conf["parallel"] == {"tensor": 1, "pipeline": 2, "partition": "3-1"}
    assert "walltime_min" not in conf["cluster"] and len(made.stderr.splitlines()) < 20
    vjob.write(made.stdout)
    said = vjob("submit", "conf.yaml", "--dry-run", "--check-against", ".").stdout
    assert said.startswith("_01_run_inter.sh:") and said.endswith(" words: no difference\n")
    plan = vjob("submit", "conf.yaml", "--dry-run").stdout.replace('",\n#   "', " ")
    for option in words.replace(" --", "\n--").splitlines():
        assert option in plan, option


def test_what_is_copied_inside_the_container_is_there(tmp_path: Path) -> None:
    """The data lies in the checkout, the index maps elsewhere; the program finds both in a copy."""
    conf = yaml.safe_load(write_tree(tmp_path)("init", "--from", ".").stdout)
    copy = "/scratch/enroot/kim/data/copies/root/trainer"
    assert conf["data"] == {"prefix": "/root/trainer/my-gpt2_text_document"}
    container = conf["container"]
    assert container["image"] == "~/cluster/image/pytorch-23.04.sqsh"
    assert container["scratch"] == "/scratch/enroot/kim/data"
    assert container["mounts"] == [
        "~/cluster/trainer:/root/checkout",
        "~/cluster/log2:/root/log2",
        "~/cluster/small:/root/indexes",
        f"{copy}:/root/trainer",
    ]
    assert conf["setup"] == [
        f"rm -rf {copy} && mkdir -p /scratch/enroot/kim/data/copies/root",
        f"cp -r ~/cluster/trainer {copy}",
        f"cp -r ~/cluster/small/* {copy}",
    ]


def test_a_container_that_is_unpacked_each_time_is_so_here(tmp_path: Path) -> None:
    vjob = write_tree(tmp_path, ("RELOAD_CONTAINER=false", "RELOAD_CONTAINER=true"))
    container = yaml.safe_load(vjob("init", "--from", ".").stdout)["container"]
    assert container["reuse"] is False

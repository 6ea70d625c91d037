"""The examples for programs of others: a dry run of each says what they would get."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from tests.command import ROOT, Vjob


def preview(tmp_path: Path, name: str) -> tuple[Vjob, str]:
    """In a tree with what the example's comments tell the user to have."""
    folder = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", folder)
    for path in ("Megatron-LM/pretrain_gpt.py", "data/wiki_text_document.bin"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "data/wiki_text_document.idx").touch()
    (folder / "train_deepspeed.py").touch()
    vjob = Vjob(tmp_path)
    options = ("--dry-run", "--set", "cluster.scheduler=slurm")
    return vjob, vjob("submit", f"examples/{name}", *options).stdout


def read_commented(text: str, name: str) -> dict[str, object]:
    lines = text.partition(f"---- {name}\n")[2].partition("\n# ----")[0].splitlines()
    found: dict[str, object] = json.loads("\n".join(line.removeprefix("# ") for line in lines))
    return found


def test_the_megatron_example(tmp_path: Path) -> None:
    _, text = preview(tmp_path, "megatron.yaml")
    command = read_commented(text, "plan.json")["command"]
    assert isinstance(command, list)
    assert command[2].endswith("Megatron-LM/pretrain_gpt.py")
    assert "E|t*11|t*8|t*8|t*8|t*8|t*5|L" in command
    assert re.search(r"#SBATCH --nodes=8\b", text)


def test_the_deepspeed_example(tmp_path: Path) -> None:
    _, text = preview(tmp_path, "deepspeed.yaml")
    command = read_commented(text, "plan.json")["command"]
    assert isinstance(command, list)
    assert command[3] == "--local_rank=%{local_rank}"
    config = read_commented(text, "ds_config.json")
    assert config["train_batch_size"] == 64 and config["wall_clock_breakdown"] is True
    assert config["zero_optimization"] == {
        "stage": 2,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "overlap_comm": True,
        "reduce_bucket_size": 50000000,
        "allgather_bucket_size": 50000000,
    }

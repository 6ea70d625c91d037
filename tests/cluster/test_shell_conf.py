"""A `_00_conf.sh` and its job scripts on the lab: imported, tried, submitted, looked at, reported.

Its checkout is a stand-in that prints a patched Megatron-LM's log; enroot is none of the lab's, so
the ranks run bare, on the data where it lies.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.lab import Lab
from tests.command import PROGRAMS, Vjob
from tests.shelf.importers.shell_conf_tree import SCRIPTS
from tests.varuna_core.trace.test_engines import order_1f1b
from vjob.reports.analysis.measures import analyse
from vjob.reports.load.tables import load_job

pytestmark = pytest.mark.slurm
IMAGE = struct.pack(
    "<4sIIIIHHHHHHQQ", b"hsqs", 1, 0, 131072, 0, 6, 17, 0, 1, 4, 0, 0, 48
)  # a squashfs image of 48 bytes, by its own words
BARE = (
    *("--set", "container.runtime=none", "--set", "setup=[]"),
    *("--set", "data.prefix=../small/my-gpt2_text_document"),
)


def write_tree(folder: Path) -> Path:
    """Scripts and checkout in one folder, image and data beside it."""
    trainer = folder / "cluster/trainer"
    shutil.copytree(PROGRAMS / "patched_megatron", trainer)
    for name, text in SCRIPTS.items():
        (trainer / name).write_text(text)
    for name in ("image/pytorch-23.04.sqsh", "small/my-gpt2_text_document.bin",
                 "small/my-gpt2_text_document.idx", "log2/empty"):  # fmt: skip
        path = folder / "cluster" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(IMAGE)
    return trainer


def read_plan(text: str) -> tuple[list[str], dict[str, Any]]:
    """What ranks run and in which container, of a dry run's plan."""
    plan = json.loads("".join(line.removeprefix("#") for line in text.splitlines()))
    return plan["command"], plan["containers"][0]


def test_a_shell_conf_is_imported_submitted_watched_and_reported(
    clean_lab: Lab, tmp_path: Path
) -> None:
    trainer = write_tree(tmp_path)
    vjob = Vjob(trainer, {**clean_lab.env, "HOME": str(tmp_path)})

    text = vjob("init", "--from", ".").stdout
    conf = yaml.safe_load(text)
    assert conf["container"]["image"] == "~/cluster/image/pytorch-23.04.sqsh"
    assert conf["container"]["mounts"][2] == "~/cluster/small:/root/indexes"
    vjob.write(text)
    script, _, plan = vjob("submit", "conf.yaml", "--dry-run").stdout.partition("# ---- plan.json")
    command, container = read_plan(plan)
    for option, value in {
        "--balance": "3-1",
        "--timing-log-option": "all",
        "--data-path": "/root/trainer/my-gpt2_text_document",
        "--lr-warmup-fraction": ".01",
    }.items():
        assert command[command.index(option) + 1] == value
    assert container["runtime"] == "enroot" and {"--root", "--rw"} <= set(container["hold"])
    assert f"{tmp_path}/cluster/small /root/indexes none" in str(container["prepare"])
    for queue, gpu in (("gpu1", "a100"), ("gpu2", "a10")):
        assert f"#SBATCH --partition={queue}\n" in script
        assert f"#SBATCH --gres=gpu:{gpu}:2\n" in script

    run = vjob.submit(text, *BARE)
    assert vjob.wait_over(run)["verdict"] == "COMPLETED", vjob.explain(run)
    status = vjob.status(str(run.path))
    assert (status["progress"]["step"], status["progress"]["num_steps"]) == (6, 6)
    shown = vjob("status", str(run.path), "--once").stdout
    assert "step 3 " in shown, shown

    job = load_job(run.path)
    acts = job.events[job.events["kind"].isin(["F", "B"])]
    assert sorted(acts["step"].unique()) == [1, 2, 3, 4, 5, 6]
    assert {(rank, stage) for rank, stage in zip(acts["rank"], acts["stage"], strict=True)} == {
        (0, 0), (1, 0), (2, 1), (3, 1)
    }  # fmt: skip
    for (stage, _, _), own in acts.groupby(["stage", "replica", "step"]):
        own = own.sort_values("begin_s")
        found = [f"{stage}{k}{m}" for k, m in zip(own["kind"], own["microbatch"], strict=True)]
        assert found == order_1f1b(int(stage))
    assert str(job.find_partition("0")) == "3-1"
    measures = analyse(job)
    assert measures.paces is not None
    assert measures.paces.work_s == pytest.approx((4 * 0.09, 4 * 0.03))

    said = vjob("report", str(run.path), "--text").stdout
    for words in ("\nPIPELINE\n", "\nSTAGES\n", "3-1", "rank 2: 2202 MB"):
        assert words in said, said
    vjob("report", str(run.path), "-o", "page.html")
    page = (trainer / "page.html").read_text()
    assert (
        "Megatron&#39;s timers" in page and json.dumps(conf["parallel"]["partition"])[1:-1] in page
    )

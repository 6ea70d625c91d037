"""The ways that the README leads: each step must be seen, or the path has a dead end."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.lab import Lab
from tests.stranger.confs import LAPTOP, MIXED, UNIFORM, WITH_GPUS
from tests.stranger.walk import Walk

NO_CLUSTER = ("SLURM_CONF",)


def walk_uniform(walk: Walk) -> None:
    """The quickstart on Slurm."""
    walk.write("conf.yaml", UNIFORM)
    walk.type("doctor", r"^ok +slurm version")
    walk.type("submit conf.yaml --dry-run", "^#SBATCH --partition=gpu1")
    walk.type("submit conf.yaml --test-only", "to start at")
    walk.type("submit conf.yaml", "as job .*slurm")
    walk.wait("last", r"checkpoint of step \d+", 120)
    walk.wait("last", "RUNNING +HEALTHY", 60)
    said = walk.type("status last --json", r'"health": ?"\w+"')
    assert json.loads(said)["progress"]["num_steps"] == 5000
    walk.look("last", r"HEALTHY")
    walk.type("logs last -n 3", "lm loss")
    walk.type("stacks last", "2 of 2 ranks")
    walk.type("cancel last", "checkpointed and left")
    said = walk.type("status last --once", "it ended well after step .* after vjob cancel")
    more = int(re.findall(r"after step (\d+)", said)[0]) + 20
    walk.type(f"submit conf.yaml --set train.steps={more}", "as job")
    walk.wait("last", "COMPLETED +DONE", 180)
    walk.type("logs last --grep resumed", "resumed from iteration")
    walk.type("report last --text", "was useful steps")
    walk.type("report last", "wrote .*report.html")


def walk_mixed(walk: Walk, lab: Lab) -> None:
    """Two kinds of nodes, one of which loses its power."""
    walk.write("gpus.yaml", WITH_GPUS)
    walk.type("plan gpus.yaml --write plan.json", "no plan in this space is faster")
    walk.type("submit gpus.yaml --plan plan.json --dry-run", "^#SBATCH --partition=gpu2")
    walk.write("mixed.yaml", MIXED)
    walk.type("profile mixed.yaml --sizes 2 --follow", "written to .*profile.json")
    walk.type("plan mixed.yaml", "no plan in this space is faster")
    walk.type("submit mixed.yaml", "as job")
    walk.wait("last", r"checkpoint of step \d+", 120)
    said = walk.type("status last --json", r'"health": ?"\w+"')
    hosts = [node["name"] for node in json.loads(said)["nodes"]]
    start = time.monotonic()
    lab.crash_node(next(host for host in reversed(hosts) if host.startswith("b")))
    walk.note("(a node of `gpu2` loses its power)", start, "")
    walk.look("last", "MORPHING|since the morph")
    walk.wait("last", r"morphed from 4 x 1 to \d x \d", 120)
    walk.wait("last", r"RUNNING +HEALTHY", 120)
    walk.type("grow last --count 1 --queue gpu1", "brings a node")
    walk.wait("last", r"morphed 2 times, last from", 120)
    walk.wait("last", r"RUNNING +HEALTHY", 120)
    walk.type("shrink last --count 1", "asked to leave")
    walk.wait("last", r"morphed 3 times, last from", 120)
    walk.wait("last", r"RUNNING +HEALTHY", 120)
    walk.type("cancel last", "checkpointed and left")
    walk.type("report last --text", "^MORPHS")


def walk_compared(walk: Walk) -> None:
    """The mixed run beside the uniform one, when both are there."""
    walk.type("compare uniform mixed", "median step")


def walk_astray(walk: Walk) -> None:
    """What people get wrong, and what they are told."""
    walk.write("conf.yaml", UNIFORM)
    typo = UNIFORM.replace("sequence", "sequense").replace("pipeline", "pipline")
    for name, text in (
        ("typo", typo),
        ("queue", UNIFORM.replace("gpu1", "gpu9")),
        ("many", UNIFORM.replace("count: 2", "count: 8").replace("layers: 8", "layers: 16")),
        ("other", UNIFORM.replace("ranks: 1", 'gpus: "h100:1"')),
        ("gpus", UNIFORM.replace("ranks: 1", 'gpus: "a100:1"').replace("uniform", "gpus")),
    ):
        text = text.replace("pipeline: 2", "pipeline: 8") if name == "many" else text
        walk.write(f"{name}.yaml", text)
    walk.type("submit typo.yaml", 'did you mean "sequence"', code=2)
    walk.type("submit queue.yaml", "sinfo -s", code=1)
    walk.type("submit many.yaml", "will not start: .*lower count")
    walk.type("status last --once", "lower count", code=12)
    walk.type("cancel last", "cancelled")
    walk.type("submit other.yaml", "sinfo -o", code=1)
    walk.type("submit conf.yaml", "scheduler: local", code=1, without=NO_CLUSTER, shows=(
        "`vjob submit conf.yaml` without a cluster"))  # fmt: skip
    walk.type("status nope", "`vjob list` shows them", code=2)
    walk.type("submit gpus.yaml --follow", "torch .* finds no GPU: ", code=None)
    walk.type("status last --once", "FAILED +DEAD", code=10)
    walk.type("cancel last", "is over already", code=2)
    walk.type("stacks last", "only what runs has stacks", code=2)
    walk.type("grow last --count 1", "morph: {enabled: true}", code=2)


def walk_queue(walk: Walk, lab: Lab) -> None:
    """A job that waits because the nodes are taken."""
    walk.write("waits.yaml", UNIFORM.replace("uniform", "waits"))
    words = ["sbatch", "--parsable", "--output=/dev/null", "-pgpu1", "-N2", "--exclusive"]
    held = lab.run([*words, "--wrap=sleep 300"])
    walk.type("submit waits.yaml", "as job")
    walk.wait("last", "no nodes are free for it yet|higher priority", 60)
    walk.type("status last --once", "PENDING +PENDING")
    walk.type("cancel last", "cancelled")
    lab.run(["scancel", held.stdout.strip()])


def walk_disk(walk: Walk, disk: Path) -> None:
    """No room for the checkpoint; on this machine, for a disk of the lab is not to be had later."""
    walk.write("full.yaml", LAPTOP.replace("checkpoints/first", str(disk / "ckpt")))
    walk.type("submit full.yaml --follow", "No space left on device", code=None)
    walk.type("status last --once", "No space left on device", code=10)
    walk.type("logs last --errors", "what to do: .*(disk|room|space)")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A megabyte; only root mounts."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "vjob", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)

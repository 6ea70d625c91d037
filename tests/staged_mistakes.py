"""Mistakes that users make, staged: for each a script, keys of its conf, and what names the cause.

All but one let the conf pass every check of `vjob submit`; they show once the program runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONF: Mapping[str, Any] = {
    "name": "staged",
    "program": {"script": "train.py"},
    "cluster": {
        "scheduler": "local",
        "walltime_min": 30,
        "grace_s": 2,
        "nodes": [{"group": "all", "count": 2, "ranks": 1}],
    },
}
STEPS = """
for step in range(1, 100_000):
    time.sleep(0.05)
    if os.environ["RANK"] == "0":
        print(f"step {step}/100000 loss {3 / step:.4f}", flush=True)
"""
HEAD = """
import argparse, os, socket, time
"""
RENDEZVOUS = """
place = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(place) as server:
        others = [server.accept() for _ in range(int(os.environ["WORLD_SIZE"]))]
else:
    while True:
        try:
            joined = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    joined.makefile().readline()
"""
"""Rank 0 counts itself among those that it waits for."""

SAME_PORT = """
held = socket.socket()
if os.environ["RANK"] == "0":
    held.bind(("127.0.0.1", 0))
    with open("port.part", "w") as file:
        file.write(str(held.getsockname()[1]))
    os.rename("port.part", "port")
    time.sleep(1000)
else:
    while not os.path.exists("port"):
        time.sleep(0.1)
    with open("port") as file:
        held.bind(("127.0.0.1", int(file.read())))
"""
"""The second rank wants the first one's port, whichever of them starts first; the first waits for
it, as in any rendezvous."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake."""

    script: str
    """Before the loop of steps."""
    cause: tuple[str, ...]
    """Words of the sentence that names it, all of them."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Of the conf, by section."""
    limit_s: int = 600
    needs_torch: bool = False
    loop: str = STEPS


MISTAKES: Mapping[str, Mistake] = {
    "an import of what is not installed": Mistake(
        script="import tokenizerz\n",
        cause=("ModuleNotFoundError", "tokenizerz"),
    ),
    "a wrong data path": Mistake(
        script="corpus = open('/data/corpus/train.bin', 'rb')\n",
        cause=("FileNotFoundError", "/data/corpus/train.bin"),
    ),
    "a shape that does not fit": Mistake(
        script="import torch\ntorch.nn.Linear(8, 4)(torch.zeros(2, 16))\n",
        cause=("shapes cannot be multiplied",),
        needs_torch=True,
    ),
    "more memory than there is": Mistake(
        script="import torch\nweights = torch.empty(2**47)\n",
        cause=("memory",),
        needs_torch=True,
    ),
    "a checkpoint folder that cannot be written": Mistake(
        script="",
        cause=("train.checkpoint.folder", "cannot be written"),
        keys={"train": {"checkpoint": {"folder": "/proc/checkpoints"}}},
    ),
    "a missing argument": Mistake(
        script="parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--data', required=True)\n"
        "parser.parse_args()\n",
        cause=("the following arguments are required: --data",),
    ),
    "a rendezvous that waits for a rank too many": Mistake(
        script=RENDEZVOUS,
        cause=("ranks wait",),
        limit_s=30,
    ),
    "a secret that is not set": Mistake(
        script="key = os.environ['WANDB_API_KEY']\n",
        cause=("KeyError", "WANDB_API_KEY"),
    ),
    "a loss that is not a number": Mistake(
        script="",
        cause=("loss is nan", "step 1"),
        loop=STEPS.replace("{3 / step:.4f}", "{float('nan')}"),
    ),
    "a port of its own on each rank": Mistake(
        script=SAME_PORT,
        cause=("Address already in use",),
    ),
}


def write_mistake(
    folder: Path, mistake: Mistake | None, changes: Mapping[str, Any] | None = None
) -> None:
    """Write train.py and conf.yaml; without a mistake they are healthy."""
    folder.mkdir(parents=True, exist_ok=True)
    script, loop = (mistake.script, mistake.loop) if mistake is not None else ("", STEPS)
    (folder / "train.py").write_text(HEAD + script + loop)
    conf = merge(CONF, mistake.keys if mistake is not None else {})
    (folder / "conf.yaml").write_text(json.dumps(merge(conf, changes or {})))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with another's values over it, at every depth."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        is_deep = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if is_deep else value
    return merged

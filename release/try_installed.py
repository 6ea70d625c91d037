"""Tries a wheel as a user has it: in an empty venv, from another folder, with what pip brings.

    python release/try_installed.py dist/vjob-0.1.0-py3-none-any.whl [--lowest]

With --lowest the dependencies are the oldest that the wheel allows. Nothing of a checkout is used.
"""

from __future__ import annotations

import argparse
import email
import json
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

TRAIN = """
import time
for step in range(1, 21):
    time.sleep(0.05)
    print(f"step {step}/20 loss {3 / step:.4f}", flush=True)
"""
CONF = """
name: small
program: {script: train.py}
cluster: {scheduler: local, walltime_min: 2, nodes: {ranks: 2}}
"""
PLANNED = """
name: planned
program: pretrain_gpt
data: {synthetic: true}
model: {layers: 12, hidden: 768, heads: 12, sequence: 1024}
train: {global_batch_size: 32, steps: 10}
cluster:
  scheduler: slurm
  walltime_min: 60
  nodes: [{group: all, count: 2, queue: gpu, gpus: "a100:4"}]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--lowest", action="store_true", help="with the oldest dependencies")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        vjob = install(given.wheel.resolve(), Path(folder, "venv"), is_lowest=given.lowest)
        use(vjob, Path(folder))
    print("installed, and each command did its work")


def install(wheel: Path, folder: Path, *, is_lowest: bool) -> Path:
    """The path of the command `vjob` in a new venv."""
    venv.create(folder, with_pip=True)
    words = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet", str(wheel)]
    if is_lowest:
        bounds = folder / "lowest.txt"
        bounds.write_text("\n".join(list_lowest(wheel)) + "\n")
        words += ["--constraint", str(bounds)]
    subprocess.run(words, check=True, cwd="/")
    return folder / "bin/vjob"


def list_lowest(wheel: Path) -> Iterator[str]:
    """The oldest version of each dependency without an extra, as constraints."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(packed.read(name))
    for line in metadata.get_all("Requires-Dist", []):
        found = re.match(r"([\w.-]+).*?>=([\d.]+)", line)
        if found and "extra ==" not in line:
            yield f"{found[1]}=={found[2]}"


def use(vjob: Path, folder: Path) -> None:
    """Submit, look, report, compare and plan; CalledProcessError where a command fails."""

    def call(*words: str) -> str:
        done = subprocess.run(
            [vjob, *words], cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout

    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "XDG_STATE_HOME": f"{folder}/state"}
    (folder / "train.py").write_text(TRAIN)
    (folder / "conf.yaml").write_text(CONF)
    (folder / "planned.yaml").write_text(PLANNED)
    for _ in range(2):
        call("submit", "conf.yaml", "--follow")
    status = json.loads(call("status", "last", "--json"))
    assert status["verdict"]["health"] == "DONE", status["verdict"]
    assert "loss 0.1500" in call("logs", "last")
    call("report", "last", "-o", "page.html")
    assert "<html" in (folder / "page.html").read_text()
    names = [row["run"] for row in json.loads(call("list", "--json"))]
    assert len(names) == 2, names
    assert call("compare", *names)
    assert "stage" in call("plan", "planned.yaml")
    assert "# ---- batch.sh" in call("submit", "planned.yaml", "--dry-run")


if __name__ == "__main__":
    sys.exit(main())

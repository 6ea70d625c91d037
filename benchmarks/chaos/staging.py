"""Testbeds whose runs can be held in a phase: ranks, and nodes that start, wait at gates.

    gate `start`      ranks wait before the first step of their attempt
    gate `training`   a script's ranks go on with steps and do not save
    gate `save`       a checkpoint that has begun does not end
    gate `last`       ranks that were asked to end wait: before their last save, or in their end
    gate `join`       a node that starts waits in the conf's setup lines

A gate is closed while a file of its name stands in the run's folder of gates. Nothing of vjob knows
of them: what waits is the training's own code, and the shell of a node before the agent starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.chaos.faults import ANYWHERE
from benchmarks.chaos.lab_testbed import LabTestbed
from benchmarks.chaos.phases import JOIN, MORPH, OVER, QUEUE, REQUEUED, SAVE, START, TRAINING
from benchmarks.chaos.testbed import CONF, Testbed

GATES: Mapping[str, tuple[str, ...]] = {
    JOIN: ("join", "training"),
    START: ("start",),
    TRAINING: ("training",),
    SAVE: ("save",),
    MORPH: ("last",),
    REQUEUED: ("last",),
    OVER: ("last",),
}
"""Gates that keep a run in a phase."""
OF_CHECKPOINTS = ("damage newest", "fill store", "kill waiting")
"""Faults that need checkpoints of Varuna's, or ranks that wait."""
PAUSE_S = 0.01

# A sitecustomize of ranks with torch. A rank is held in a layer, or before the marker that says
# that its part of a checkpoint is whole; the folder's time goes on, so that it counts as written.
GATED_RANKS = """
import os
import time
from pathlib import Path

import torch.nn.functional as functional

gates = Path({gates!r})
gelu, replace = functional.gelu, os.replace
begun = []


def gated_gelu(*values, **options):
    while not begun and (gates / "start").exists():
        time.sleep(0.05)
    begun.append(True)
    time.sleep({pause_s})
    return gelu(*values, **options)


def gated_replace(source, target, **options):
    folder, name = os.path.split(os.fspath(target))
    save = os.path.dirname(folder)
    if name.startswith("rank-") and save.endswith(".partial"):
        while (gates / "save").exists() or (gates / "last").exists():
            try:
                os.utime(save)
            except OSError:
                pass
            time.sleep(0.05)
    return replace(source, target, **options)


functional.gelu = gated_gelu
os.replace = gated_replace
"""
STEPS_CONF = (
    CONF.replace("lr: 1.0e-2", "lr: 1.0e-3")
    .replace("min_lr: 1.0e-3", "min_lr: 1.0e-4")
    .replace("max_nodes: 6", "max_nodes: 5")
    .replace('OMP_NUM_THREADS: "1"', 'OMP_NUM_THREADS: "1", PYTHONPATH: calm')
)
SCRIPT_CONF = """
name: chaos
program: {{script: train.py, snapshot: none}}
cluster:
  {cluster}
  walltime_min: 20
  grace_s: 15
  join_s: 20
  lost_s: 15
  requeue: true
morph: {{enabled: true, mode: world, min_nodes: 2, max_nodes: 8}}
setup: {setup}
"""
SCRIPT = """
import os, signal, time
from pathlib import Path

asked = []
is_first, attempt = os.environ["RANK"] == "0", os.environ["VJOB_ATTEMPT"]
place, history = Path("ckpt/place"), Path("ckpt/history")
step = int(place.read_text()) if place.exists() else 0


def is_closed(gate):
    return Path("gates", gate).exists()


def end(number, _):
    while is_closed("last"):
        time.sleep(0.05)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def save():
    part = Path(f"ckpt/place.{attempt}.partial")
    part.write_text(str(step))
    while is_closed("save"):
        os.utime(part)
        time.sleep(0.05)
    os.replace(part, place)


for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: asked.append(1))
signal.signal(signal.SIGTERM, end)
while is_closed("start") and not asked:
    time.sleep(0.05)
while not asked:
    step += 1
    time.sleep(0.1)
    if is_first:
        with history.open("a") as file:
            file.write(f"{attempt} {step}\\n")
        print(f"step {step}/1000000 loss 1.0", flush=True)
        if step % 10 == 0 and not is_closed("training"):
            save()
while is_closed("last"):
    time.sleep(0.05)
if is_first:
    save()
"""


class GatedTestbed(Testbed):
    """A testbed with gates; its run does not end by itself."""

    conf = STEPS_CONF
    num_nodes = 3
    is_script = False

    @property
    def gates(self) -> Path:
        return self.folder / "gates"

    def prepare(self) -> None:
        super().prepare()
        self.gates.mkdir()
        if self.is_script:
            (self.folder / "train.py").write_text(SCRIPT)
            return
        calm = self.folder / "calm"
        calm.mkdir()
        text = GATED_RANKS.format(gates=str(self.gates), pause_s=PAUSE_S)
        (calm / "sitecustomize.py").write_text(text)

    def list_setup(self) -> list[str]:
        gate = json.dumps(str(self.gates / "join"))
        return [*super().list_setup(), f"while [ -e {gate} ]; do sleep 0.1; done"]

    def close_gates(self, phase: str) -> None:
        for name in GATES.get(phase, ()):
            (self.gates / name).touch()

    def open_gates(self) -> None:
        for path in self.gates.iterdir():
            path.unlink(missing_ok=True)


class LocalRun(GatedTestbed):
    """Nodes on this machine."""

    cluster = "scheduler: local\n  nodes: [{group: all, count: 3, ranks: 1}]"


class LabRun(GatedTestbed, LabTestbed):
    """Three of the lab's nodes. Another job keeps all of them while a run is to wait."""

    kinds: tuple[str, ...] = LabTestbed.kinds
    cluster = "scheduler: slurm\n  nodes: [{group: all, count: 3, queue: low, ranks: 1}]"
    _blocker = ""

    def close_gates(self, phase: str) -> None:
        super().close_gates(phase)
        if phase == QUEUE:
            self._blocker = self.preempt(list(self.lab.nodes))

    def open_gates(self) -> None:
        super().open_gates()
        if self._blocker:
            self.lab.run(["scancel", self._blocker], check=False)
            self._blocker = ""


class ScriptRun(GatedTestbed):
    """Ranks without torch, which start in no time; they write down what they do themselves."""

    kinds = tuple(kind for kind in ANYWHERE if kind not in OF_CHECKPOINTS)
    conf = SCRIPT_CONF
    cluster = "scheduler: local\n  nodes: [{group: all, count: 4, ranks: 1}]"
    num_nodes = 4
    is_script = True


class LabScriptRun(LabRun):
    """The same on the lab."""

    kinds = tuple(kind for kind in LabRun.kinds if kind not in OF_CHECKPOINTS)
    conf = SCRIPT_CONF
    is_script = True


TESTBEDS: Mapping[str, Callable[[Path], GatedTestbed]] = {
    "local": LocalRun,
    "lab": LabRun,
    "script": ScriptRun,
    "lab-script": LabScriptRun,
}

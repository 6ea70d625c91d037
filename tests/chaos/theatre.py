"""A run on the lab that is led through a story: what its scenes can do to it.

Steps are long enough (40 micro-batches) that all scenes come before the last of them, and no two
samples are alike, so that a wrong one shows in the loss.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

from tests.chaos.lab_stage import LabStage
from tests.cluster.lab import Lab
from tests.cluster.processes import ProcessId, read_stat, send_signal
from varuna_core.morph.orders import get_seat
from varuna_core.records.files import read_json

STEPS = 300
BATCH = 40
CONF = """
name: eight
program: pretrain_gpt
model: {{layers: 6, hidden: 32, heads: 2, sequence: 16, vocab: 64, dropout: 0.0}}
data: {{prefix: text, split: "8,1,1"}}
train:
  steps: {steps}
  global_batch_size: BATCH
  micro_batch_size: 1
  optimizer: {{lr: 2.0e-3, weight_decay: 0.1}}
  schedule: {{warmup_steps: 20, min_lr: 5.0e-4}}
  log_every: 1
  evaluate: {{every: 0}}
  checkpoint: {{folder: ckpt, every: 5, keep: 3}}
parallel: {{pipeline: 2}}
cluster:
  scheduler: slurm
  {cluster}
  walltime_min: 20
  grace_s: 5
  join_s: 30
  lost_s: 15
  requeue: true
morph: {{enabled: true, min_nodes: 2, max_nodes: 6}}
setup: {setup}
env: {{OMP_NUM_THREADS: "1"}}
""".replace("BATCH", str(BATCH))


class Theatre(LabStage):
    """The six nodes of the lab, all of them the story's."""

    conf = CONF

    def __init__(self, folder: Path, cluster: str, lab: Lab | None = None) -> None:
        super().__init__(folder, lab)
        self.cluster = cluster
        self._preemptor = ""
        self._dark: list[str] = []

    def make_documents(self) -> list[list[list[int]]]:
        """More samples than the training reads, each a walk of its own."""
        dice = random.Random(10)
        length, count = 500, STEPS * BATCH * 16 * 2 // 500
        return [[_walk(dice, length)] for _ in range(count)]

    def read_members(self) -> list[int]:
        """Seats of the attempt that ranks train in; none where there is none."""
        state = self.read_state()
        members = state.get("members")
        assert isinstance(members, list | None)
        return [get_seat(node) for node in members or ()]

    def find_host(self, seat: int) -> str:
        return str(read_json(self.run.morph.node(seat))["host"])

    # What scenes do.

    def grow(self, count: int, queue: str) -> None:
        self.vjob("grow", str(self.run.path), "--count", str(count), "--queue", queue)

    def shrink(self, count: int) -> None:
        self.vjob("shrink", str(self.run.path), "--count", str(count))

    def darken(self, seat: int) -> None:
        host = self.find_host(seat)
        self._dark.append(host)
        self.lab.crash_node(host)

    def kill_node(self, seat: int) -> None:
        pid = read_json(self.run.morph.node(seat))["pid"]
        stat = read_stat(pid)
        assert stat is not None, f"seat {seat}: pid {pid} is gone"
        send_signal(ProcessId(pid, stat[0].start_ticks), signal.SIGKILL)

    def lose_all_but_two(self) -> None:
        """A job of a better queue wants one of the first job's nodes, and all that are idle."""
        own = {self.find_host(seat) for seat in range(4)}
        idle = [name for name in self.lab.nodes if name not in own]
        self._preemptor = self.preempt([self.find_host(1), *idle])

    def grow_anew(self) -> None:
        """Once the preempting job has ended and all nodes have power."""
        self.lab.run(["scancel", self._preemptor])
        self.lighten()
        self.grow(2, "all")

    def lighten(self) -> None:
        for host in self._dark:
            self.lab.restore_node(host)
        self._dark.clear()

    def cancel_last_join(self) -> None:
        """The job that joined last, as its owner or an administrator may."""
        jobs = sorted(self.run.morph.path.glob("joins/*.job.json"))
        self.lab.run(["scancel", str(read_json(jobs[-1])["job"])])

    def cancel_component(self) -> None:
        self.lab.run(["scancel", f"{self.job}+1"])

    def hold_half(self) -> None:
        """The second job of a split run."""
        self.lab.run(["scontrol", "requeuehold", self.second_job])

    def release_half(self) -> None:
        self.lighten()
        self.lab.run(["scontrol", "release", self.second_job])

    def cancel_half(self) -> None:
        self.lab.run(["scancel", self.second_job])

    @property
    def second_job(self) -> str:
        return str(read_json(self.run.record)["jobs"][1]["id"])


def _walk(dice: random.Random, length: int) -> list[int]:
    found = [dice.randrange(60)]
    while len(found) < length:
        found.append((found[-1] + dice.randrange(1, 8)) % 60)
    return found

"""Scenarios of eight morphs each: what is done to a training, and the nodes it then uses.

    plain   one job of a queue that others may preempt, and jobs of another queue that join it
    het     a het job of two queues; it grows from one of them, and loses its second component
    split   the same two groups as two jobs, the second of which goes, comes back, and goes for good

Six layers on a pipeline of two as asked: of 6 nodes are used 6 (3 x 2), of 5 and of 4 four (2 x 2),
of 3 three (3 x 1), of 2 two (2 x 1). Steps are long enough (40 micro-batches) that all changes come
before the last of them, and no two samples are alike, so that a wrong one shows in the loss.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.lab_testbed import LabTestbed
from tests.cluster.lab import Lab
from tests.cluster.processes import ProcessId, read_stat, send_signal
from varuna_core.records.files import read_json
from varuna_core.records.morphing import get_seat

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


class ScenarioTestbed(LabTestbed):
    """All six nodes of the lab, and the actions of scenarios on them."""

    conf = CONF

    def __init__(self, folder: Path, cluster: str, lab: Lab | None = None) -> None:
        super().__init__(folder, lab)
        self.cluster = cluster
        self._preemptor = ""
        self._powered_off: list[str] = []

    def make_documents(self) -> list[list[list[int]]]:
        """Make more samples than the training reads, each a random walk of its own."""
        rng = random.Random(10)
        length, count = 500, STEPS * BATCH * 16 * 2 // 500
        return [[_walk(rng, length)] for _ in range(count)]

    def read_members(self) -> list[int]:
        """Read the seats of the current attempt; none if there is no attempt."""
        state = self.read_state()
        members = state.get("members")
        assert isinstance(members, list | None)
        return [get_seat(node) for node in members or ()]

    def find_host(self, seat: int) -> str:
        return str(read_json(self.run.morph.node(seat))["host"])

    # Actions of scenarios.

    def grow(self, count: int, queue: str) -> None:
        self.vjob("grow", str(self.run.path), "--count", str(count), "--queue", queue)

    def shrink(self, count: int) -> None:
        self.vjob("shrink", str(self.run.path), "--count", str(count))

    def power_off_node(self, seat: int) -> None:
        host = self.find_host(seat)
        self._powered_off.append(host)
        self.lab.crash_node(host)

    def kill_node(self, seat: int) -> None:
        pid = read_json(self.run.morph.node(seat))["pid"]
        stat = read_stat(pid)
        assert stat is not None, f"seat {seat}: pid {pid} is gone"
        send_signal(ProcessId(pid, stat[0].start_ticks), signal.SIGKILL)

    def preempt_all_but_two(self) -> None:
        """Submit a job of a better queue that wants one of the run's nodes and all idle ones."""
        own = {self.find_host(seat) for seat in range(4)}
        idle = [name for name in self.lab.nodes if name not in own]
        self._preemptor = self.preempt([self.find_host(1), *idle])

    def grow_again(self) -> None:
        """End the preempting job, restore power and ask for two nodes."""
        self.lab.run(["scancel", self._preemptor])
        self.restore_power()
        self.grow(2, "all")

    def restore_power(self) -> None:
        for host in self._powered_off:
            self.lab.restore_node(host)
        self._powered_off.clear()

    def cancel_last_join(self) -> None:
        """Cancel the job that joined last."""
        jobs = sorted(self.run.morph.path.glob("joins/*.job.json"))
        self.lab.run(["scancel", str(read_json(jobs[-1])["job"])])

    def cancel_component(self) -> None:
        self.lab.run(["scancel", f"{self.job}+1"])

    def hold_second_job(self) -> None:
        """Requeue and hold the second job of a split run."""
        self.lab.run(["scontrol", "requeuehold", self.second_job])

    def release_second_job(self) -> None:
        self.restore_power()
        self.lab.run(["scontrol", "release", self.second_job])

    def cancel_second_job(self) -> None:
        self.lab.run(["scancel", self.second_job])

    @property
    def second_job(self) -> str:
        return str(read_json(self.run.record)["jobs"][1]["id"])


def _walk(rng: random.Random, length: int) -> list[int]:
    found = [rng.randrange(60)]
    while len(found) < length:
        found.append((found[-1] + rng.randrange(1, 8)) % 60)
    return found


@dataclass(frozen=True, kw_only=True)
class Change:
    """One action on a run, and the morph it leads to."""

    what: str
    do: Callable[[ScenarioTestbed], None]
    members: int
    """Number of nodes of the attempt that follows."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    cluster: str
    members: int
    changes: tuple[Change, ...]


GROUPS = """nodes:
    - {group: one, count: 2, queue: gpu1, ranks: 1}
    - {group: two, count: 2, queue: gpu2, ranks: 1}
  hetero: """
PLAIN = Scenario(
    cluster="nodes: [{group: all, count: 4, queue: low, ranks: 1}]",
    members=4,
    changes=(
        Change(what="2 nodes of another queue join", do=lambda it: it.grow(2, "all"), members=6),
        Change(what="a node loses its power", do=lambda it: it.power_off_node(3), members=4),
        Change(what="shrunk by 2", do=lambda it: it.shrink(2), members=3),
        Change(
            what="preempted, and requeued with the 2 nodes that are left",
            do=ScenarioTestbed.preempt_all_but_two,
            members=2,
        ),
        Change(what="all nodes are free again, 2 join", do=ScenarioTestbed.grow_again, members=4),
        Change(what="2 more nodes join", do=lambda it: it.grow(2, "all"), members=6),
        Change(what="their job is cancelled", do=ScenarioTestbed.cancel_last_join, members=4),
        Change(what="shrunk by 1", do=lambda it: it.shrink(1), members=3),
    ),
)
HET = Scenario(
    cluster=f"{GROUPS}hetjob",
    members=4,
    changes=(
        Change(what="2 nodes join", do=lambda it: it.grow(2, "gpu2"), members=6),
        Change(what="shrunk by 2", do=lambda it: it.shrink(2), members=4),
        Change(
            what="what stays on a node of the second component is killed",
            do=lambda it: it.kill_node(3),
            members=3,
        ),
        Change(what="warned, requeued with all nodes", do=ScenarioTestbed.warn, members=4),
        Change(what="2 nodes join", do=lambda it: it.grow(2, "gpu2"), members=6),
        Change(
            what="the second component is cancelled", do=ScenarioTestbed.cancel_component, members=4
        ),
        Change(
            what="a node that joined loses its power",
            do=lambda it: it.power_off_node(max(it.read_members())),
            members=3,
        ),
        Change(what="shrunk by 1", do=lambda it: it.shrink(1), members=2),
    ),
)
SPLIT = Scenario(
    cluster=f"{GROUPS}split",
    members=4,
    changes=(
        Change(
            what="a node of the second job loses its power",
            do=lambda it: it.power_off_node(3),
            members=3,
        ),
        Change(
            what="the second job is requeued and held",
            do=ScenarioTestbed.hold_second_job,
            members=2,
        ),
        Change(
            what="it is released, all have power", do=ScenarioTestbed.release_second_job, members=4
        ),
        Change(what="2 nodes join", do=lambda it: it.grow(2, "gpu2"), members=6),
        Change(
            what="what stays on a node of the first job is killed",
            do=lambda it: it.kill_node(1),
            members=4,
        ),
        Change(what="warned, all jobs requeued", do=ScenarioTestbed.warn, members=6),
        Change(what="the second job is cancelled", do=ScenarioTestbed.cancel_second_job, members=4),
        Change(what="shrunk by 1", do=lambda it: it.shrink(1), members=3),
    ),
)
SCENARIOS = {"plain": PLAIN, "het": HET, "split": SPLIT}

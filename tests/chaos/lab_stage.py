"""The same run on the real Slurm of tests/cluster: nodes with links, daemons, power of their own.

The nodes share this machine's files. So a cut link cuts the ranks from each other and a node from
the controller, but not from the run folder. Slurm's daemons have the machine's clock.
"""

from __future__ import annotations

import signal
from pathlib import Path

from tests.chaos.faults import ANYWHERE, ON_SLURM, Fault
from tests.chaos.stage import Stage
from tests.chaos.strikes import NOBODY, Pause, Strike, pick_node
from tests.cluster import daemons, network
from tests.cluster.lab import Lab
from tests.cluster.processes import read_record, send_signal
from tests.cluster.shape import LabError
from varuna_core.morph.orders import Presence
from varuna_core.records.files import read_json

SLOW_MBIT = 1.0
PREEMPT_S = 10.0
"""Until a preempted job has let its nodes go (GraceTime of the lab and a little)."""
NOTICED_S = 16.0
"""Until the controller calls a silent node down (docs/lab.md)."""


class LabStage(Stage):
    """Four of the lab's six nodes, in a queue that others may preempt; spare ones take a requeued
    job."""

    kinds = (*ANYWHERE, *ON_SLURM)
    cluster = "scheduler: slurm\n  nodes: [{group: all, count: 4, queue: low, ranks: 1}]"

    def __init__(self, folder: Path, lab: Lab | None = None) -> None:
        super().__init__(folder, lab.env if lab is not None else None)
        self._lab = lab
        self._is_ours = lab is None

    @property
    def lab(self) -> Lab:
        assert self._lab is not None
        return self._lab

    def open(self) -> None:
        """Disks before the lab: a node sees those that were mounted when it started."""
        self.prepare()
        if self._lab is None:
            try:
                self._lab = Lab.attach()
                self._lab.repair()
            except LabError:  # none is up
                self.mount()
                self._lab = Lab.start()
            self.vjob.env.update(self.lab.env)

    def close(self, *, keep: bool) -> None:
        try:
            if self._lab is not None:
                self.lab.start_controller()
                self.end_run()
                self.lab.repair()
                if self._is_ours and self._lab.started_here:
                    self._lab.stop()
        finally:
            self.unmount(keep=keep)

    @property
    def job(self) -> str:
        return str(read_json(self.run.record)["jobs"][0]["id"])

    def warn(self) -> None:
        self.lab.run(["scancel", "--signal=USR1", "--batch", self.job], check=False)

    def name_clock(self, node: Presence) -> str:
        return node.host

    def requeue(self) -> None:
        self.lab.run(["scontrol", "requeue", self.job], check=False)

    def preempt(self, hosts: list[str]) -> str:
        """A job of a better queue that wants these nodes; its id."""
        words = ["sbatch", "--parsable", "--partition=all", "--exclusive", "--output=/dev/null"]
        words += [f"--nodelist={','.join(hosts)}", f"--nodes={len(hosts)}", "--wrap=sleep 900"]
        return self.lab.run(words).stdout.strip()

    def stop_slurmd(self, host: str) -> None:
        """The daemon alone: the steps on its node go on."""
        send_signal(read_record(self.lab.paths.pid_record(host)), signal.SIGKILL)

    def start_slurmd(self, host: str) -> None:
        if not daemons.is_running(self.lab.paths, host):
            daemons.start_slurmd(host, self.lab.paths)

    def cut_link(self, host: str) -> None:
        network.cut_link(host)

    def mend_link(self, host: str) -> None:
        network.mend_link(host, self.lab.paths)


def power_off(stage: Stage, fault: Fault, pause: Pause) -> str:
    """Back after the controller has noticed, but for the node of the batch script.

    A minute after a node was lost Slurm 22.05 repeats the kill of what ran there, by the job's
    number. The job may have begun there anew by then, for the lab does not wait 120 s before a
    requeue, and would be ended.
    """
    node = pick_node(stage, fault)
    if node is None:
        return NOBODY
    seconds = fault.lasts_s + NOTICED_S
    cluster = as_lab(stage).lab
    cluster.crash_node(node.host)
    pause(seconds)
    if node.seat == 0:
        return f"{node.host}, the first node, has no power any more"
    cluster.restore_node(node.host)
    return f"{node.host} had no power for {seconds:.1f} s"


def cut_link(stage: Stage, fault: Fault, pause: Pause) -> str:
    """Every other time for so long that the controller calls the node down."""
    node = pick_node(stage, fault)
    if node is None:
        return NOBODY
    seconds = fault.lasts_s if fault.pick * 100 % 2 < 1 else fault.lasts_s + NOTICED_S
    as_lab(stage).cut_link(node.host)
    pause(seconds)
    as_lab(stage).mend_link(node.host)
    return f"cut the link of {node.host} for {seconds:.1f} s"


def slow_link(stage: Stage, fault: Fault, pause: Pause) -> str:
    node = pick_node(stage, fault)
    if node is None:
        return NOBODY
    cluster = as_lab(stage).lab
    cluster.slow_link(node.host, SLOW_MBIT, latency_ms=200)
    pause(fault.lasts_s)
    cluster.clear_link(node.host)
    return f"slowed the link of {node.host} to {SLOW_MBIT:g} Mbit/s for {fault.lasts_s} s"


def stop_slurmd(stage: Stage, fault: Fault, pause: Pause) -> str:
    node = pick_node(stage, fault)
    if node is None:
        return NOBODY
    as_lab(stage).stop_slurmd(node.host)
    pause(fault.lasts_s)
    as_lab(stage).start_slurmd(node.host)
    return f"killed slurmd of {node.host}, back after {fault.lasts_s} s"


def restart_controller(stage: Stage, fault: Fault, pause: Pause) -> str:
    cluster = as_lab(stage).lab
    cluster.stop_controller()
    pause(fault.lasts_s)
    cluster.start_controller()
    return f"no controller for {fault.lasts_s} s"


def requeue(stage: Stage, fault: Fault, pause: Pause) -> str:
    as_lab(stage).requeue()
    return "requeued the job, as an administrator does"


def preempt(stage: Stage, fault: Fault, pause: Pause) -> str:
    """By a job that wants one node: Slurm warns the whole job, and requeues it."""
    node = pick_node(stage, fault)
    if node is None:
        return NOBODY
    job = as_lab(stage).preempt([node.host])
    pause(fault.lasts_s + PREEMPT_S)
    as_lab(stage).lab.run(["scancel", job], check=False)
    return f"a job of a better queue took {node.host}"


def as_lab(stage: Stage) -> LabStage:
    assert isinstance(stage, LabStage)
    return stage


LAB_STRIKES: dict[str, Strike] = {
    "power off": power_off,
    "cut link": cut_link,
    "slow link": slow_link,
    "stop slurmd": stop_slurmd,
    "restart controller": restart_controller,
    "requeue": requeue,
    "preempt": preempt,
}

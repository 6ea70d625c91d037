"""The testbed on the real Slurm of tests/cluster: nodes with their own links, daemons and power.

The nodes share this machine's files. So a cut link cuts the ranks from each other and a node from
the controller, but not from the run folder. Slurm's daemons have the machine's clock.
"""

from __future__ import annotations

import signal
from pathlib import Path

from benchmarks.chaos.faults import ANYWHERE, ON_SLURM
from benchmarks.chaos.testbed import Testbed
from tests.cluster import daemons, network
from tests.cluster.lab import Lab
from tests.cluster.processes import read_record, send_signal
from tests.cluster.shape import LabError
from varuna_core.morph.orders import Presence
from varuna_core.records.files import read_json


class LabTestbed(Testbed):
    """Four of the lab's six nodes, in a queue that others may preempt; spare ones take a requeued
    job."""

    kinds: tuple[str, ...] = (*ANYWHERE, *ON_SLURM)
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
        """Mount disks before the lab starts: a node sees those that were mounted at its start."""
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
        """Submit a job of a better queue that wants these nodes; return its id."""
        words = ["sbatch", "--parsable", "--partition=all", "--exclusive", "--output=/dev/null"]
        words += [f"--nodelist={','.join(hosts)}", f"--nodes={len(hosts)}", "--wrap=sleep 900"]
        return self.lab.run(words).stdout.strip()

    def stop_slurmd(self, host: str) -> None:
        """Kill the daemon alone: the steps on its node go on."""
        send_signal(read_record(self.lab.paths.pid_record(host)), signal.SIGKILL)

    def start_slurmd(self, host: str) -> None:
        if not daemons.is_running(self.lab.paths, host):
            daemons.start_slurmd(host, self.lab.paths)

    def cut_link(self, host: str) -> None:
        network.cut_link(host)

    def mend_link(self, host: str) -> None:
        network.mend_link(host, self.lab.paths)

"""The testbed of an experiment: one run, its processes (found in /proc), disks and clocks.

It starts nothing but `vjob`, and signals only processes of its run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.chaos.clock import Clocks
from benchmarks.chaos.faults import ANYWHERE
from tests.cluster.processes import (
    ProcessId,
    find_descendants,
    is_alive,
    read_stat,
    run,
    send_signal,
)
from tests.command import Vjob
from tests.small_training import DOCUMENTS
from varuna_core.morph.orders import Presence, read_presences
from varuna_core.records.files import read_json
from varuna_core.records.morphing import read_state
from varuna_core.records.runfolder import RunFolder

CONF = """
name: chaos
program: pretrain_gpt
model: {{layers: 4, hidden: 16, heads: 2, sequence: 8, vocab: 64, dropout: 0.0}}
data: {{prefix: text, split: "8,2,0"}}
train:
  steps: {steps}
  global_batch_size: 16
  micro_batch_size: 1
  optimizer: {{lr: 1.0e-2, weight_decay: 0.1}}
  schedule: {{warmup_steps: 2, min_lr: 1.0e-3}}
  log_every: 1
  evaluate: {{every: 0}}
  checkpoint: {{folder: ckpt, every: 10, keep: 3}}
parallel: {{pipeline: 2}}
cluster:
  {cluster}
  walltime_min: 20
  grace_s: 5
  join_s: 20
  lost_s: 15
  requeue: true
morph: {{enabled: true, min_nodes: 2, max_nodes: 6}}
setup: {setup}
env: {{OMP_NUM_THREADS: "1"}}
"""
DISKS = ("ckpt", "log")


class Testbed:
    """One run on this machine, without Slurm."""

    __test__ = False  # pytest takes each Test... of a test file for tests
    kinds: tuple[str, ...] = ANYWHERE
    conf = CONF
    disk_mb = 48
    cluster = "scheduler: local\n  nodes: [{group: all, count: 4, ranks: 1}]"

    def __init__(self, folder: Path, env: dict[str, str] | None = None) -> None:
        self.folder, self.vjob = folder, Vjob(folder, env)
        self.store, self.clocks = folder / "ckpt", Clocks(folder)
        self._run: RunFolder | None = None
        self._mounted: list[Path] = []

    def open(self) -> None:
        self.prepare()
        self.mount()

    def prepare(self) -> None:
        """Make folders, data and clocks."""
        from tests.varuna_core.data.tokens import write_tokens

        write_tokens(self.folder / "text", self.make_documents())
        for name in DISKS:
            (self.folder / name).mkdir()
        self.clocks.build()

    def make_documents(self) -> list[list[list[int]]]:
        return DOCUMENTS

    def mount(self) -> None:
        """Mount small disks that can be filled; without root those faults hit nothing."""
        if os.geteuid() == 0:
            for name in DISKS:
                path = self.folder / name
                size = f"size={self.disk_mb}m"
                run(["mount", "-t", "tmpfs", "-o", size, "vjob-chaos", str(path)])
                self._mounted.append(path)

    def close(self, *, keep: bool) -> None:
        """End the run and unmount its disks; `keep` copies their contents out first."""
        try:
            self.end_run()
        finally:
            self.unmount(keep=keep)

    def end_run(self) -> None:
        if self._run is None:
            return
        record = read_json(self._run.record) or {}  # its folder may be gone
        if record.get("state") != "ended":
            self.vjob("cancel", str(self._run.path), "--now", code=None)

    def unmount(self, *, keep: bool) -> None:
        for path in self._mounted:
            if keep:
                run(["cp", "-a", f"{path}", f"{path}.kept"], check=False)
            run(["umount", "--lazy", str(path)])
            if keep:
                path.rmdir()
                os.rename(f"{path}.kept", path)
        self._mounted.clear()

    def submit(self, steps: int) -> RunFolder:
        setup = json.dumps(self.list_setup())
        text = self.conf.format(steps=steps, cluster=self.cluster, setup=setup)
        return self.adopt(self.vjob.submit(text))

    def list_setup(self) -> list[str]:
        """Lines that each node runs first."""
        return [f"export {name}={path}" for name, path in self.clocks.env.items()]

    def adopt(self, run: RunFolder) -> RunFolder:
        """Take a run that was submitted otherwise for this testbed's."""
        self._run = run
        return run

    @property
    def run(self) -> RunFolder:
        assert self._run is not None
        return self._run

    # Targets of faults.

    def read_state(self) -> dict[str, object]:
        state = read_state(self.run.morph)
        return {} if state is None else asdict(state)

    def list_nodes(self) -> list[Presence]:
        """List the session's live nodes, by seat."""
        session = str(self.read_state().get("session"))
        found = read_presences(self.run.morph, session)
        return [found[seat] for seat in sorted(found) if read_stat(found[seat].pid) is not None]

    def find_node_processes(self, node: Presence) -> set[ProcessId]:
        """Find the node's daemon and all its descendants."""
        stat = read_stat(node.pid)
        return set() if stat is None else find_descendants({stat[0]})

    def find_agent(self, node: Presence) -> ProcessId | None:
        """Find the attempt's agent: the older of two, for the other waits for the next attempt."""
        return next(iter(self._list_children(node)), None)

    def find_waiting(self, node: Presence) -> list[ProcessId]:
        """Find the agent of the next attempt, and the ranks that wait with it."""
        return [one for agent in self._list_children(node)[1:] for one in find_descendants({agent})]

    def _list_children(self, node: Presence) -> list[ProcessId]:
        stats = [read_stat(process.pid) for process in self.find_node_processes(node)]
        found = [stat[0] for stat in stats if stat and stat[1] == node.pid]
        return sorted(found, key=lambda process: (process.start_ticks, process.pid))

    def find_ranks(self, node: Presence) -> list[ProcessId]:
        agent = self.find_agent(node)
        stats = [read_stat(process.pid) for process in self.find_node_processes(node)]
        below = [stat[0] for stat in stats if stat and agent and stat[1] == agent.pid]
        return sorted((p for p in below if b"\0RANK=" in _read(p, "environ")), key=lambda p: p.pid)

    def find_managers(self) -> list[ProcessId]:
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and (stat := read_stat(int(name))) is not None:
                words = _read(stat[0], "cmdline").split(b"\0")
                if b"manage" in words and bytes(self.run.path) in words:
                    found.append(stat[0])
        return found

    def list_leftovers(self) -> list[str]:
        """List processes of the run that are left after its end."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                stat = read_stat(int(name))
                line = b"" if stat is None else _read(stat[0], "cmdline")
                if bytes(self.run.path) in line and b"--seed" not in line:
                    found.append(line.replace(b"\0", b" ").decode(errors="replace"))
        return found

    # Actions of a scheduler or a user.

    def warn(self) -> None:
        """Signal the batch script that the time limit or a preemption is near."""
        os.kill(read_json(self.run.path / "local.json")["pid"], signal.SIGUSR1)

    def name_clock(self, node: Presence) -> str:
        """Return the host name of the node's clock; here all nodes share the machine's."""
        return os.uname().nodename

    def has_clock(self, node: Presence) -> bool:
        """Tell if the node's agent reads a clock that can be stepped."""
        stat = read_stat(node.pid)
        return stat is not None and b"CHAOS_CLOCKS=" in _read(stat[0], "environ")

    def ask_to_leave(self, seat: int) -> None:
        words = ["morph", "leave", "--run", str(self.run.path), "--node", str(seat)]
        run(["python3", str(self.run.agent), *words])

    @contextlib.contextmanager
    def fill_disk(self, folder: Path) -> Iterator[None]:
        """Keep the folder's disk full inside the block."""
        filler = folder / ".filler"
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as handle:
            size = 1 << 16
            while size:
                try:
                    handle.write(bytes(size))
                except OSError:
                    size //= 2
        try:
            yield
        finally:
            filler.unlink(missing_ok=True)


def _read(process: ProcessId, name: str) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/{name}").read_bytes()
    except OSError:
        return b""


def signal_all(family: set[ProcessId], number: signal.Signals) -> None:
    for process in family:
        send_signal(process, number)


def slow_down(process: ProcessId, seconds: float) -> None:
    """Stop the process four fifths of the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and is_alive(process):
        send_signal(process, signal.SIGSTOP)
        time.sleep(0.2)
        send_signal(process, signal.SIGCONT)
        time.sleep(0.05)

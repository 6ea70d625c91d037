"""The lab as an object: start, attach, stop, and the accidents that tests need.

It refuses to pass off a lab of another kind as the one asked for, and never changes nodes or
jobs behind a test's back: only `repair` and `stop` cancel anything.
"""

import contextlib
import logging
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence

from tests.cluster import daemons, files, lifecycle, network, processes, states
from tests.cluster.record import LabPaths, LabRecord, hold_lock, load_record, save_record
from tests.cluster.requirements import explain_missing
from tests.cluster.shape import Group, LabError, build_groups

logger = logging.getLogger("vjob.lab")


class Lab:
    """A running lab. Make one with `Lab.start` or `Lab.attach`."""

    def __init__(self, paths: LabPaths, record: LabRecord, *, started_here: bool) -> None:
        self.paths = paths
        self.started_here = started_here
        """False when the lab was up already: then it is not ours to stop."""
        self.shape = lifecycle.build_shape(record)
        self._record = record

    @classmethod
    def start(
        cls,
        accounting: bool = True,
        *,
        num_a: int = 2,
        num_b: int = 4,
        paths: LabPaths | None = None,
    ) -> "Lab":
        """Start a lab, or attach to the one that is up when it is of the same kind."""
        paths = paths or LabPaths()
        groups = build_groups(num_a, num_b)
        if problem := explain_missing():
            raise LabError(problem)
        with hold_lock("change", timeout_s=lifecycle.CHANGE_TIMEOUT_S):
            record = load_record(paths)
            if record and lifecycle.is_up(paths, record):
                lab = cls(paths, record, started_here=False)
                lab._refuse_other_kind(groups, accounting)
                return lab
            if record:
                logger.info("removing the remains of a lab that was cut off or killed")
                lifecycle.remove_lab(paths, record)
            record = lifecycle.start_lab(paths, groups, accounting=accounting)
            return cls(paths, record, started_here=True)

    @classmethod
    def attach(cls, paths: LabPaths | None = None) -> "Lab":
        """The lab that is up; LabError when there is none."""
        paths = paths or LabPaths()
        record = load_record(paths)
        if record is None:
            raise LabError("no lab is up; start one: python -m tests.cluster up")
        if not lifecycle.is_up(paths, record):
            dead = ", ".join(lifecycle.find_dead_daemons(paths, record)) or "its start was cut off"
            raise LabError(
                f"the lab in {paths.folder} is broken (not running: {dead}); "
                "`python -m tests.cluster up` starts it afresh, `down` removes it"
            )
        return cls(paths, record, started_here=False)

    def stop(self) -> None:
        """End and remove all of it; fine when it is gone already."""
        lifecycle.stop_lab(self.paths)

    # -- use ----------------------------------------------------------------------------------

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that a process needs to speak to this cluster."""
        return states.build_env(self.paths)

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.shape.nodes

    @property
    def node_addresses(self) -> dict[str, str]:
        return self.shape.node_addresses

    def run(
        self, command: Sequence[str], *, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command against this cluster, from the machine's own network (a login node)."""
        return processes.run(command, env=self.env, timeout_s=timeout_s, check=check)

    def read_node_states(self) -> dict[str, str]:
        """Slurm's words, such as `idle`, `mixed`, `down*`; the star means: does not answer."""
        return states.read_node_states(self.paths)

    def wait_idle(self, timeout_s: float = lifecycle.IDLE_TIMEOUT_S) -> None:
        """Wait until every node is idle; cancels nothing."""
        states.wait_node_states(self.paths, self.nodes, states.IDLE, timeout_s)

    # -- accidents ----------------------------------------------------------------------------

    def crash_node(self, name: str) -> None:
        """A power cut: the link goes first, so that no dying process can say goodbye."""
        self._check_node(name)
        network.cut_link(name)
        processes.kill_namespace(self.paths.namespace(name))

    def restore_node(self, name: str, timeout_s: float = lifecycle.IDLE_TIMEOUT_S) -> None:
        """Power back: link, slurmd, and the wait until the node is idle (or has work again)."""
        self._check_node(name)
        since = self._power_on(name)
        states.wait_registered(self.paths, name, since, timeout_s)

    def _power_on(self, name: str) -> float:
        """Returns the time from which on the node's slurmd has started."""
        network.mend_link(name, self.paths)
        if daemons.is_running(self.paths, name):
            return 0.0
        since = time.time()
        daemons.start_slurmd(name, self.paths)
        return since

    def stop_controller(self) -> None:
        """slurmctld saves its state and ends; jobs go on. Fine when it is stopped."""
        self._record.controller_stopped = True
        save_record(self.paths, self._record)
        with contextlib.suppress(FileNotFoundError):
            process = processes.read_record(self.paths.pid_record("slurmctld"))
            processes.end(process, patience_s=20)

    def start_controller(self) -> None:
        """slurmctld again, from its saved state, until it knows the nodes. Fine when it runs."""
        if not daemons.is_running(self.paths, "slurmctld"):
            daemons.start_slurmctld(self.paths)
            states.wait_known(self.paths, self.nodes, lifecycle.IDLE_TIMEOUT_S)
        self._record.controller_stopped = False
        save_record(self.paths, self._record)

    @contextlib.contextmanager
    def without_accounting(self) -> Iterator[None]:
        """The same cluster as a site without slurmdbd: sacct says that accounting is disabled.

        slurm.conf is rewritten with accounting_storage/none and the controller restarted, before
        and after; nodes and jobs are left alone. slurmdbd goes on, unheard.
        """
        self._hide_accounting(True)
        try:
            yield
        finally:
            self._hide_accounting(False)

    def _hide_accounting(self, hidden: bool) -> None:
        self.stop_controller()
        self._record.accounting_hidden = hidden
        save_record(self.paths, self._record)
        daemons.write_slurm_conf(
            self.shape,
            self.paths,
            host_name=lifecycle.read_host_name(),
            accounting=self._record.accounting and not hidden,
        )
        self.start_controller()

    def serve_files(self) -> None:
        """Let each node mount `paths.shared` over its own link. Fine when they have."""
        if problem := files.explain_no_files():
            raise LabError(problem)
        if not daemons.is_running(self.paths, files.DAEMON):
            files.start_server(self.shape, self.paths)
        for node in self.nodes:
            if not files.is_mounted(node, self.paths):
                files.mount(node, self.paths)

    def stop_files(self) -> None:
        """Nodes share this machine's files again, and what lay in `paths.shared` is removed."""
        for node in self.nodes:
            files.unmount(node, self.paths)
        files.stop_server(self.paths)
        shutil.rmtree(self.paths.shared, ignore_errors=True)

    def cut_link(self, name: str) -> None:
        """Cut a node's link: with files over a network, its files too."""
        self._check_node(name)
        network.cut_link(name)

    def mend_link(self, name: str) -> None:
        """A node's link is back, and nothing else of it. Fine when it was not cut."""
        self._check_node(name)
        network.mend_link(name, self.paths)

    def slow_link(self, name: str, rate_mbit: float, latency_ms: float) -> None:
        """Limit a node's link both ways; `latency_ms` bounds the queue, it is no wire delay."""
        self._check_node(name)
        network.slow_link(name, self.paths, rate_mbit=rate_mbit, latency_ms=latency_ms)

    def clear_link(self, name: str) -> None:
        """Full speed again. Fine when the link was not slowed."""
        self._check_node(name)
        network.clear_link(name, self.paths)

    def repair(self) -> None:
        """Undo every accident: no jobs, accounting on, links at full speed, all nodes idle."""
        if self._record.accounting_hidden:
            self._hide_accounting(False)
        self.start_controller()
        # KILL first: a job that ignores TERM would cost KillWait.
        self.run(["scancel", "--user=root", "--full", "--signal=KILL"], check=False)
        self.run(["scancel", "--user=root"], check=False)
        for node in self.nodes:
            self.clear_link(node)
            if since := self._power_on(node):
                states.wait_registered(self.paths, node, since, lifecycle.IDLE_TIMEOUT_S)
        self._resume_nodes()
        try:
            self.wait_idle()
        except LabError:  # a node may be drained for the very job that was just killed
            self._resume_nodes()
            self.wait_idle()

    def _resume_nodes(self) -> None:
        for node, state in self.read_node_states().items():
            if state.startswith(("drain", "down")):
                self.run(["scontrol", "update", f"nodename={node}", "state=resume"])

    def _check_node(self, name: str) -> None:
        if name not in self.nodes:
            raise LabError(f"no node {name!r}; the lab has {', '.join(self.nodes)}")

    def _refuse_other_kind(self, groups: tuple[Group, ...], accounting: bool) -> None:
        if self.shape.groups != groups or self._record.accounting != accounting:
            have = "with" if self._record.accounting else "without"
            raise LabError(
                f"the lab that is up has nodes {', '.join(self.nodes)} {have} accounting, which is "
                "not what was asked for; stop it first: python -m tests.cluster down"
            )

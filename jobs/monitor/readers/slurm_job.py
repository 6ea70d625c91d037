"""Reader of a Slurm job that vjob did not submit: the same snapshot, with the facts that are known.

    scontrol ─► parts ─► a row a part; a node a part with output of its own ─► Snapshot ─► judge
                  └─► running, ours, with GPUs: the driver's tool beside it, once a minute at most

There is no agent that records when lines are written, so their times are bounded by the file's size
at each poll (`SeenTimes`). At the first poll they are not known.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from varuna_core.agent.gpu.accelerator import GpuSample, find_lost, list_accelerators
from varuna_core.facts.cluster import NodeState
from varuna_core.facts.known import Known, NotKnown
from varuna_core.records.logs.tail import last_lines
from varuna_core.records.logs.times import LineTimes
from vjob.jobs.errors import UncertainError
from vjob.jobs.monitor.log_lines.errors import Classifier
from vjob.jobs.monitor.log_lines.reported_exits import parse_reported_exits
from vjob.jobs.monitor.model.snapshot import (
    Gpu,
    JobRow,
    Line,
    Node,
    ReportedExit,
    Scheduler,
    Snapshot,
)
from vjob.jobs.monitor.readers.node_files import (
    NodeFiles,
    choose_tail,
    count_lines,
    find_progress,
    view_logs,
)
from vjob.jobs.monitor.readers.scheduler import NODES_EVERY_S, make_row
from vjob.jobs.runs.foreign_job import ask_again
from vjob.jobs.schedulers import broker
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.foreign_job import ForeignJob, JobPart

MOST = 400
"""Number of last lines of a log in which launchers' reports are searched for."""
GPU_EVERY_S = 60.0
"""Seconds between two readings of GPUs, since a step beside the job costs the controller a few
requests."""


class SeenTimes:
    """Write times of lines, bounded by the files' sizes at each poll."""

    def __init__(self) -> None:
        self._marks: tuple[list[tuple[int, float]], list[tuple[int, float]]] = ([], [])

    def note(self, at: float, out: int, err: int) -> None:
        """Record the sizes of both logs at this time."""
        for marks, size in zip(self._marks, (out, err), strict=True):
            if marks and size < marks[-1][0]:
                marks.clear()
            if marks and size == marks[-1][0]:
                marks[-1] = size, at
            else:
                marks.append((size, at))

    def read(self) -> tuple[LineTimes, LineTimes]:
        out, err = (_SeenMarks.make(marks) for marks in self._marks)
        return out, err


class _SeenMarks(LineTimes):
    """Sizes of a log at several times. A line was written between the two times around its offset,
    which may be far apart."""

    @classmethod
    def make(cls, marks: list[tuple[int, float]]) -> LineTimes:
        return cls(tuple(place for place, _ in marks), tuple(at for _, at in marks))

    def find_exact(self, offset: int) -> tuple[float | None, float]:
        at = bisect_right(self.offsets, offset) - 1
        if at < 0 or at + 1 >= len(self.times):
            return None, 0.0
        return self.times[at], self.times[at + 1] - self.times[at]


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of one node, as the driver's tool last printed them."""

    reading: Known[Sequence[GpuSample]]

    def add_to(self, node: Node) -> Node:
        if isinstance(self.reading, NotKnown):
            return replace(node, gpus_not_known=self.reading.reason)
        gpus = tuple(_make_gpu(one) for one in self.reading.value)
        return replace(node, gpus=gpus, gpus_lost=find_lost(self.reading))


class SlurmJobReader:
    """Incremental reader of snapshots of one job."""

    def __init__(
        self, job: ForeignJob, *, num_lines: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._job, self._num_lines, self._clock = job, num_lines, clock
        self._is_first = True
        self._problem = ""
        self._classifier = Classifier()
        self._files: dict[str, NodeFiles] = {}
        self._times: dict[str, SeenTimes] = {}

    def find_logs(self) -> dict[str, dict[str, str]]:
        """Return the paths of logs by kind, keyed by the name of the node or part."""
        return {self._name_node(name): files for name, files in self._job.files.items()}

    def read(self) -> Snapshot:
        """Return a snapshot of the job's present state."""
        if not self._is_first:
            self._ask()
        self._is_first = False
        now = self._clock()
        self._poll(now)
        job, nodes = self._job, self._files.values()
        parts = job.parts
        started = min((x.started for x in parts if x.started is not None), default=None)
        notes = [*job.notes, *list_notes(job)]
        rows = tuple(make_row(part.info) for part in parts)
        exits = self._read_reported_exits()
        view = view_logs(nodes, find_progress(nodes))
        view = replace(
            view,
            attempt_started=started,
            nodes=tuple(files.build_node(self._num_lines) for files in nodes),
            errors=tuple(self._place(line, exits) for line in view.errors),
        )
        snapshot = Snapshot(
            **vars(view),
            now=now,
            run=" ".join(filter(None, (job.word, parts[0].name))),
            folder=parts[0].work_dir,
            state=choose_state(rows),
            submitted=min((x.submitted for x in parts if x.submitted is not None), default=None),
            walltime_s=parts[0].limit_s,
            time_limit=parts[0].info.limit,
            scheduler=Scheduler(
                name=job.scheduler,
                jobs=rows,
                node_states=self._ask_nodes(),
                age_s=max(0.0, round(now - job.asked, 1)),
                problem=self._problem,
            ),
            num_nodes=sum(part.num_nodes or 0 for part in parts) or None,
            reported_exits=exits,
        )
        gpus, why = self._read_gpus()
        known = {node.name: node for node in snapshot.nodes}
        nodes_now = tuple(
            gpus[name].add_to(known.get(name, Node(name=name))) if name in gpus else known[name]
            for name in dict.fromkeys([*known, *gpus])
        )
        notes += [why] if why else []
        return replace(snapshot, nodes=nodes_now, message="; ".join(notes))

    def _read_reported_exits(self) -> tuple[ReportedExit, ...]:
        """Read the ends that launchers report, once the job is over."""
        paths = [path for files in self._job.files.values() for path in files.values()]
        wanted = paths if self._job.is_over else []
        return tuple(
            x for path in wanted for x in parse_reported_exits(last_lines(Path(path), MOST))
        )

    def _place(self, line: Line, exits: Sequence[ReportedExit]) -> Line:
        """Return the line with the name of its node, if a launcher names the node of the line's
        rank; the file itself does not show the node if several nodes write to it."""
        hosts = [host for part in self._job.parts for host in part.info.nodes]
        if len(self._job.files) > 1 or len(hosts) < 2:
            return line
        named = [one.node for one in exits if one.rank is not None and one.rank == line.rank]
        return replace(line, node=next(iter(named), ""))

    def count_lines(self, nodes: Collection[str]) -> Mapping[str, Mapping[str, int]]:
        return count_lines(self._files, nodes)

    def _ask(self) -> None:
        try:
            found = ask_again(self._job)
            self._problem = ""
        except UncertainError as error:
            self._problem = str(error)
            return
        if found is not None:
            self._job = found if found.files else _keep_files(found, self._job)

    def _poll(self, now: float) -> None:
        found = self._job.files
        tail_bytes = choose_tail(sum(map(len, found.values())))
        for name, files in found.items():
            shown = self._name_node(name)
            if shown not in self._files:
                times = self._times[shown] = SeenTimes()
                self._files[shown] = NodeFiles(
                    shown, files, self._classifier, tail_bytes, self._num_lines, times=times
                )
            held = self._files[shown]
            # Before the look: what it reads beyond this came later than the look before.
            sizes = {kind: _read_size(path) for kind, path in files.items()}
            self._times[shown].note(now, sizes.get("out", 0), sizes.get("err", 0))
            held.poll()

    def _name_node(self, part: str) -> str:
        """Return the name of a part: its first host if only one part has logs, else the part."""
        if len(self._job.files) == 1:
            hosts = self._job.parts[0].info.nodes
            return hosts[0] if hosts else part
        return part

    def _ask_nodes(self) -> tuple[NodeState, ...]:
        """Return the states of the job's nodes while it is running."""
        names = [name for part in self._job.parts if part.is_running for name in part.info.nodes]
        scheduler = schedulers.get_scheduler(self._job.scheduler)
        return tuple(scheduler.ask_node_states(names, floor_s=NODES_EVERY_S))

    def _read_gpus(self) -> tuple[dict[str, NodeGpus], str]:
        """Return the GPUs of the job's nodes, keyed by host, and why GPUs are not known; empty if
        they are."""
        gpus: dict[str, NodeGpus] = {}
        for part in self._job.parts:
            if not (part.has_gpus and part.is_running):
                continue
            if not part.is_ours:
                return {}, f"GPUs are not known: the job belongs to {part.user or 'another user'}"
            try:
                answer = broker.ask(build_gpu_command(part), floor_s=GPU_EVERY_S)
            except UncertainError as error:
                return gpus, f"the job's GPUs are not known: {error}"
            seen = parse_gpus(answer.text)
            if not seen:
                return gpus, "the job's GPUs are not known: no tool that reads GPUs is on its nodes"
            gpus |= seen
        return gpus, ""


def _keep_files(new: ForeignJob, old: ForeignJob) -> ForeignJob:
    """Keep the output paths of an earlier read, as Slurm's accounting has none."""
    paths = {part.info.id: (part.out, part.err) for part in old.parts}
    parts = []
    for part in new.parts:
        out, err = paths.get(part.info.id, ("", ""))
        parts.append(replace(part, out=part.out or out, err=part.err or err))
    return replace(new, parts=tuple(parts), notes=())


def choose_state(rows: Collection[JobRow]) -> str:
    """Return the state shown for the whole job: RUNNING if any part is running, else PENDING if any
    part is pending, else the state of the part that failed first, or else of the first part."""
    words = [row.state for row in rows]
    failed = [row for row in rows if row.state != "COMPLETED"]
    first = min(failed, key=lambda row: math.inf if row.ends is None else row.ends, default=None)
    over = words[0] if first is None else first.state
    return next((word for word in ("RUNNING", "PENDING") if word in words), over)


def list_notes(job: ForeignJob) -> list[str]:
    """Return notes on another owner of the job, and on what cannot be shown."""
    notes = []
    others = sorted({part.user or "another user" for part in job.parts if not part.is_ours})
    if others:
        notes.append(f"the job belongs to {' and '.join(others)}: only what you may read is shown")
    run = schedulers.get_scheduler(job.scheduler).find_run_id(job.parts[0].info.comment)
    if run:
        notes.append(f"vjob submitted it as run {run}, whose folder was removed or is unknown here")
    else:
        notes.append("vjob did not submit it, so plan, heartbeats and exit codes are missing")
    has_begun = any(part.started is not None for part in job.parts)
    if has_begun and not job.files and not job.notes:
        notes.append("Slurm names no output file (an interactive job, or /dev/null)")
    return notes


def build_gpu_command(part: JobPart) -> list[str]:
    """Return the command that runs the driver's tool on each node of the job, and fails after 10 s
    if no step can start."""
    job = part.info.leader if "+" in part.info.id else part.raw_id
    group = [f"--het-group={part.info.component}"] if "+" in part.info.id else []
    shared = ["--overlap", "--mem=0", "--cpu-bind=none", "--input=none", "--immediate=10"]
    nodes = str(part.num_nodes or 1)
    spread = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    return ["srun", f"--jobid={job}", *group, *shared, *spread, "sh", "-c", render_gpu_script()]


def render_gpu_script() -> str:
    """Return shell text that runs the tool of each GPU vendor, if the tool exists, and prefixes
    each of its lines with the names of the host and the vendor."""
    return "; ".join(
        f"if command -v {one.smi_command.split()[0]} >/dev/null; then "
        f'{one.smi_command} 2>&1 | sed "s/^/$(uname -n)|{one.name}|/"; fi'
        for one in list_accelerators()
        if one.smi_command
    )


def parse_gpus(text: str) -> dict[str, NodeGpus]:
    """Parse GPUs by host from lines such as `host|nvidia|0, A10, 61, 97, 20000, 23028, 140.1`."""
    lines: dict[tuple[str, str], list[str]] = {}
    for line in text.splitlines():
        words = line.split("|", 2)
        if len(words) == 3:
            lines.setdefault((words[0].partition(".")[0], words[1]), []).append(words[2])
    vendors = {one.name: one for one in list_accelerators()}
    found: dict[str, NodeGpus] = {}
    for (host, name), rows in lines.items():
        if name in vendors:
            found[host] = NodeGpus(vendors[name].parse_smi("\n".join(rows)))
    return found


def _make_gpu(sample: GpuSample) -> Gpu:
    return Gpu(
        index=str(sample.index), name=sample.name, utilization=sample.utilization,
        memory_used_mb=sample.memory_used_mb, memory_total_mb=sample.memory_total_mb,
        temperature=sample.temperature, power_w=sample.power_w,
    )  # fmt: skip


def _read_size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0

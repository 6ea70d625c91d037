"""Reader of one attempt (one start of the ranks); each read costs what is new."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from varuna_core.facts.hang import SAID_EARLY, Hang, HangAction, parse_hang
from varuna_core.facts.partition import Partition
from varuna_core.records.checkpoints import parse_skipped
from varuna_core.records.exits import RankExit, parse_exits, parse_judged
from varuna_core.records.files import as_number, as_whole, list_names
from varuna_core.records.logs.literals import find_marks
from varuna_core.records.logs.progress import read_pattern
from varuna_core.records.logs.slow_ranks import find_slow_ranks
from varuna_core.records.logs.training_log import CHECKPOINT
from varuna_core.records.nodes import OK
from varuna_core.records.plan import Plan
from varuna_core.records.rank_map import RankPlace, locate_ranks
from varuna_core.records.runfolder import MOST_NODES, AttemptFolder, RunFolder
from varuna_core.records.training import parse_partition, read_training
from vjob.jobs.monitor.log_lines.errors import STEP_MARKS, Classifier, list_exceptions
from vjob.jobs.monitor.log_lines.many_files import ManyFiles
from vjob.jobs.monitor.model.snapshot import AttemptView, Node, Progress, Rank
from vjob.jobs.monitor.readers.gpu_logs import describe_late
from vjob.jobs.monitor.readers.node_files import (
    NodeFiles,
    add_median,
    choose_tail,
    find_loss,
    find_progress,
    join_counts,
    join_progress,
    poll_all,
    view_logs,
)
from vjob.jobs.monitor.readers.rank_files import (
    Beats,
    JsonFolder,
    StepsFolder,
    TraceFolder,
    parse_outcome,
)

KINDS = ("gpu.jsonl", "gpu", "out", "err")


class AttemptReader:
    """Incremental reader of one attempt."""

    def __init__(self, attempt: AttemptFolder, plan: Plan | None, num_lines: int) -> None:
        self.attempt, self.plan = attempt, plan
        self.newest: float | None = None
        """The newest modification time of the files that had changed at the last poll."""
        self.files: dict[str, NodeFiles] = {}
        """The logs of each node, keyed by node name."""
        self._num_lines = num_lines
        self._many = ManyFiles()
        self._state = JsonFolder(attempt.path / "state", self._many)
        self._reports = JsonFolder(attempt.path / "nodes", self._many)
        self._beats = JsonFolder(attempt.path / "beat", self._many)
        self._exits = JsonFolder(attempt.path / "exit", self._many)
        self._lives: dict[str, Beats] = {}
        self.traces = TraceFolder(attempt, self._many)
        self._steps = StepsFolder(attempt)
        self._left_out: dict[str, str] = {}
        self._listed: dict[str, tuple[tuple[int, int], bool]] = {}
        self._pattern = read_pattern(plan.progress if plan is not None else None, attempt.path)
        self._classifier = Classifier(
            STEP_MARKS if self._pattern is None else find_marks(self._pattern.pattern)
        )
        self._places = _locate_ranks(attempt, plan) if plan is not None else {}
        self._nodes: dict[str, Node] = {}
        self._ranks: dict[int, Rank] = {}
        self._parsed_exits: dict[int, RankExit] = {}
        self._view: AttemptView | None = None

    def read(self) -> AttemptView:
        """Return the present state of the attempt."""
        changed = self._poll()
        if self._view is None or changed:
            self._view = self._build(changed)
        return self._view

    @property
    def opened(self) -> float | None:
        """Time that identifies one start of the attempt; None before the attempt has a master."""
        found = self._state.value("master").get("time")
        return float(found) if isinstance(found, (int, float)) else None

    # Looking.

    def _poll(self) -> set[str]:
        """Poll all files; return the names of nodes whose files have changed, and `state` for the
        attempt's own files."""
        changed: set[str] = set()
        times = []
        if fresh := self._state.poll():
            changed.add("state")
            times += [self._state.times[name] for name in fresh]
        for name in self._reports.poll():
            changed.add(f"#{name}")
            times.append(self._reports.times[name])
        for name in self._beats.poll():
            self._lives.setdefault(name, Beats()).note(self._beats.values[name])
            changed.add(f"#{name}")
            times.append(self._beats.times[name])
        for name in self._exits.poll():
            times.append(self._exits.times[name])
            for found in parse_exits(self._exits.values[name]):
                self._parsed_exits[found.rank] = found
                changed.add(found.node)
        self._find_files()
        self._find_traces()
        for files, is_new in poll_all([*self.files.values()], self._many):
            if is_new:
                changed.add(files.name)
                times += [files.newest] if files.newest else []
        changed.update(f"@{rank}" for rank in self.traces.poll() | self._steps.poll())
        times += self.traces.times + self._steps.times
        self.newest = max(times, default=None)
        return changed

    def _find_files(self) -> None:
        if not self._has_changed(str(self.attempt.path)):
            return
        found: dict[str, dict[str, str]] = {}
        folder = str(self.attempt.path)
        for name in list_names(self.attempt.path):
            for kind in KINDS:
                if name.endswith("." + kind):
                    node = name[: -len(kind) - 1]
                    found.setdefault(node, {})[kind] = f"{folder}/{name}"
                    break
        tail_bytes = choose_tail(sum(map(len, found.values())))
        for node, files in self._choose(found).items():
            if node in self.files:
                self.files[node].add(files)
            else:
                self.files[node] = NodeFiles(
                    node, files, self._classifier, tail_bytes, self._num_lines, self._pattern,
                    is_ours=True,
                )  # fmt: skip

    def _choose(self, found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        """Choose the logs to read, at most as many as there may be nodes; those of nodes that
        reported come first."""
        most = max(MOST_NODES, self.plan.num_nodes if self.plan is not None else 0)
        if len(found) <= most:
            return found
        hosts = [value.get("host") for value in self._reports.values.values()]
        kept = dict.fromkeys(host for host in hosts if host in found)
        chosen = list(islice(dict.fromkeys((*self.files, *kept, *sorted(found))), most))
        self._left_out = {
            f"{self.attempt.path.name}/*": f"{len(found) - most:,} nodes beyond the {most:,} that "
            "are read"
        }
        return {node: found[node] for node in chosen if node in found}

    def _find_traces(self) -> None:
        if self._has_changed(str(self.attempt.path / "trace")):
            self.traces.find()
        if self._has_changed(str(self.attempt.path / "ranks")):
            self._steps.find()

    def _has_changed(self, folder: str) -> bool:
        """Return True if the folder may have new names; open the folder first, so that NFS asks its
        server."""
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            found = os.fstat(fd)
            mark = (found.st_ino, found.st_mtime_ns)
        finally:
            os.close(fd)
        seen, is_settled = self._listed.get(folder, (None, False))
        self._listed[folder] = (mark, seen == mark)  # two names may come in one tick of the clock
        return seen != mark or not is_settled

    # Building.

    def _build(self, changed: set[str]) -> AttemptView:
        went_at = self._went_at()
        names = self._name_nodes()
        everything = self._view is None or "state" in changed
        for index, name in names.items():
            key = "" if index is None else f"#{index}"
            ranks = self._ranks_of(index)
            if everything or name in changed or key in changed:
                self._nodes[name] = self._build_node(name, index, went_at)
            for rank in ranks:
                if everything or name in changed or key in changed or f"@{rank}" in changed:
                    self._ranks[rank] = self._build_rank(rank, index, name)
        self._nodes = {name: self._nodes[name] for name in names.values()}
        failed = {
            rank: found.ended
            for rank, found in self._parsed_exits.items()
            if found.code != 0 and not found.stopped
        }
        view = view_logs(self.files.values(), self._find_progress(), failed)
        longest = dict(view.phases_s)
        saved = [step.checkpoint_s for trace in self.traces.ranks.values() for step in trace.steps]
        if saved and max(saved) > 0:
            longest[CHECKPOINT] = max(max(saved), longest.get(CHECKPOINT, 0.0))
        stop = self._state.values.get("stop")
        stop = stop if isinstance(stop, dict) and isinstance(stop.get("code"), int) else None
        outcome = parse_outcome(self._state.values.get("outcome"))
        written = self._state.values.get("end")
        raised = list_exceptions(self._parsed_exits.values(), view.errors)
        hang, suspected = choose_hang(self._state.values)
        return replace(
            view,
            attempt_started=self._state.time("master"),
            went_at=went_at,
            nodes=tuple(self._nodes.values()),
            ranks=self._mark_slow(),
            phases_s=longest,
            errors=(*view.errors, *raised),
            stop=stop,
            outcome=outcome,
            attempt_end=None if outcome is None else parse_judged(outcome, written, stop),
            hang=hang,
            suspected=suspected,
            partition=str(parse_partition(self._state.values.get("partition")) or ""),
            skipped=parse_skipped(self._state.values.get("skipped")),
            unreadable={**view.unreadable, **self._left_out},
        )

    def _went_at(self) -> float | None:
        go, master = self._state.value("go"), self._state.value("master")
        if not go or go.get("opened") != master.get("time"):
            return None
        return self._state.time("go")

    def _name_nodes(self) -> dict[Any, str]:
        """Return host names by node index; nodes that are known only from their logs come last."""
        names: dict[Any, str] = {}
        for values in (self._beats.values, self._reports.values):
            for key, value in values.items():
                if (index := as_whole(key)) is not None and value.get("host"):
                    names[index] = str(value["host"])
        names = {index: names[index] for index in sorted(names)}
        known = set(names.values())
        for at, name in enumerate(sorted(name for name in self.files if name not in known)):
            names[-1 - at] = name
        return names

    def _ranks_of(self, index: int) -> range:
        if self.plan is None or not 0 <= index < self.plan.num_nodes:
            return range(0)
        return self.plan.node(index).ranks

    def _build_node(self, name: str, index: int, went_at: float | None) -> Node:
        ranks = self._ranks_of(index)
        report = self._reports.values.get(str(index), {})
        life = self._lives.get(str(index))
        files = self.files.get(name)
        samples = files.samples if files is not None else None
        offset = as_number(report.get("clock_offset_s"))
        pids = {p.pid for p in life.processes.values() if p.pid} if life is not None else set()
        group = self.plan.node(index).group.name if ranks and self.plan else ""
        node = files.build_node(self._num_lines, pids) if files is not None else Node(name=name)
        sampled_at = None if node.gpus_at is None else node.gpus_at + (offset or 0.0)
        late, beat_at = "", self._beats.times.get(str(index))
        if node.gpus and self.plan is not None:
            late = describe_late(sampled_at, beat_at, self.plan.timing.sample_s)
        return replace(
            node,
            index=index if index >= 0 else None,
            group=group,
            ranks=tuple(ranks),
            phase=self._infer_phase(report, life, ranks, went_at),
            beat_at=beat_at,
            beat_every_s=life.every_s if life is not None else None,
            hears_usr1=life.heard_usr1 if life is not None else None,
            gpus_at=sampled_at,
            gpus_not_known=late or (samples.not_known if samples is not None else ""),
            gpus_lost=samples.lost if samples is not None else (),
            faults=samples.faults if samples is not None else (),
            clock_offset_s=offset,
            checks=tuple(
                f"{check.get('status')} {check.get('name')}: {check.get('text')}"
                for check in _as_list(report.get("checks"))
                if isinstance(check, dict) and check.get("status") != OK
            ),
        )

    def _infer_phase(
        self, report: Mapping[str, Any], life: Beats | None, ranks: range, went_at: float | None
    ) -> str:
        if ranks and all(rank in self._parsed_exits for rank in ranks):
            return "done"
        if life is not None and life.is_done:
            return "done"
        if not report:
            return ""
        if not report.get("ready"):
            return "container"
        return "ready" if went_at is None else "running"

    def _build_rank(self, rank: int, index: int, name: str) -> Rank:
        place = self._places.get(rank)
        stages = place.stages if place is not None else ()
        life = self._lives.get(str(index))
        process = life.processes.get(rank) if life is not None else None
        trace = self.traces.ranks.get(rank)
        last = trace.last if trace is not None else None
        if trace is not None and trace.stages:
            stages = trace.stages
        step_s, work_s = trace.medians() if trace is not None else (None, None)
        ended = last.end_at if last is not None else None
        step = last.step if last is not None else None
        counts = self._steps.counts.get(rank)
        if last is None and counts is not None:
            step, step_s, ended = counts.count, counts.median_s, counts.last_at
        return Rank(
            rank=rank,
            node=name,
            stage=stages[0] if stages else None,
            stages=stages,
            replica=place.replica if place is not None else None,
            pid=process.pid if process else None,
            process_state=process.state if process else "",
            cpu_percent=process.cpu_percent if process else None,
            step=step,
            is_counted=last is None and counts is not None,
            step_s=step_s,
            work_s=work_s,
            step_at=None if ended is None else ended + self._offset(index),
            device=trace.device if trace is not None else "",
            exit=self._parsed_exits.get(rank),
        )

    def _mark_slow(self) -> tuple[Rank, ...]:
        """Return all ranks, marking those slower than the running ranks of their stages."""
        ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        groups: dict[tuple[tuple[int, ...], str], list[int]] = {}
        for rank in ranks:
            if rank.exit is None and rank.work_s is not None:
                groups.setdefault((rank.stages, rank.device), []).append(rank.rank)
        peers = [own for own in groups.values() if len(own) > 1]
        works_s = {rank: self.traces.ranks[rank].works_s() for own in peers for rank in own}
        steps_s = {rank.rank: rank.step_s for rank in ranks if rank.step_s is not None}
        slow = {item.rank: item for item in find_slow_ranks(works_s, peers, steps_s)}
        return tuple(
            replace(rank, slow=slow[rank.rank]) if rank.rank in slow else rank for rank in ranks
        )

    def _offset(self, index: int) -> float:
        return as_number(self._reports.values.get(str(index), {}).get("clock_offset_s")) or 0.0

    def _find_progress(self) -> Progress | None:
        by_lines = find_progress(self.files.values())
        ends = [(trace.last.step, -rank) for rank, trace in self.traces.ranks.items() if trace.last]
        if ends:
            rank = -max(ends)[1]
            return join_progress(by_lines, self.traces.ranks[rank].points(self._offset_of(rank)))
        if not self._steps.counts:
            return by_lines
        node = by_lines.source.rpartition(".")[0] if by_lines is not None else ""
        told_by = [rank for rank, found in self._ranks.items() if found.node == node]
        counts = self._steps.counts
        reference = min((rank for rank in told_by if rank in counts), default=None)
        farthest = max(sorted(counts), key=lambda rank: counts[rank].count)
        loss = find_loss(self.files.values())
        found = join_counts(by_lines, counts, reference, self._offset_of(farthest), loss)
        is_over = parse_outcome(self._state.values.get("outcome")) is not None
        return add_median(found, counts[farthest]) if found is not None and is_over else found

    def _offset_of(self, rank: int) -> float:
        """Return the clock offset of the node of a rank, in seconds."""
        if self.plan is None or rank >= self.plan.world:
            return 0.0
        return self._offset(self.plan.node_of_rank(rank).index)


def _locate_ranks(attempt: AttemptFolder, plan: Plan) -> dict[int, RankPlace]:
    """Return the places of ranks according to the schedule; those of a user's own program are known
    only from its traces."""
    for path in (attempt.training, RunFolder(attempt.path.parent).training):
        # KeyError: a schedule that this version does not have.
        with contextlib.suppress(ValueError, KeyError):
            own = read_training(path)
            from varuna_core.schedule.registry import count_stages_per_rank, place_stages  # slow

            cuts = None if own.partition is None else Partition.parse(own.partition)
            per_rank = count_stages_per_rank(own.schedule, cuts, plan.pipeline)
            placement = place_stages(own.schedule, plan.pipeline, per_rank)
            return locate_ranks(plan.stage_map, plan.tensor, placement)
    with contextlib.suppress(ValueError):  # of no stage map of ours
        return locate_ranks(plan.stage_map, plan.tensor)
    return {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def choose_hang(values: Mapping[str, Any]) -> tuple[Hang | None, Hang | None]:
    """Return the hang that is certain and the hang that is only suspected, None for either if there
    is none; a suspicion whose witness is in SAID_EARLY counts as certain."""
    found, suspected = (parse_hang(values.get(name)) for name in ("hang", "hanging"))
    is_open = found is not None and found.until is None
    is_early = suspected is not None and suspected.witness in SAID_EARLY
    if is_early and not is_open:
        return suspected, None
    if found is not None and not is_open and found.action is not HangAction.REPORT:
        return found, found  # its ranks are being ended
    return found, None if is_early or is_open else suspected

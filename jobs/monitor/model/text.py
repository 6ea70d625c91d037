"""Render a snapshot and its verdict as plain text or JSON. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from varuna_core.facts.catalogue.known_line import Proof
from varuna_core.facts.catalogue.tables import BUILT_IN
from varuna_core.facts.cause import EndCause
from varuna_core.facts.known import NotKnown, Value, as_json
from varuna_core.facts.sentences import PHRASES
from varuna_core.records.exits import count_ends
from varuna_core.records.formatting import format_duration, format_pace, format_size
from varuna_core.records.logs.gpu_text import CPU
from varuna_core.records.logs.tail import clean, clean_name, fold
from vjob.jobs.monitor.model.snapshot import (
    COUNTED,
    ENDED,
    FORMAT,
    Echo,
    Health,
    JobRow,
    Line,
    Node,
    Progress,
    Snapshot,
    Verdict,
)

MANY_NODES = 16
NUM_POINTS = 5
"""Most points that are shown; more would push the verdict off a terminal of 24 lines."""
NUM_ERRORS = 10
NUM_EVIDENCE = 3
TELLS_RECORD = ("refused", "done", "dead")
"""Rules of verdicts that repeat what the run's record says, if no fact shows how the run ended."""


def render_json(snapshot: Snapshot, verdict: Verdict | None) -> str:
    """Render one line of JSON. A number that JSON lacks is written as text: `"nan"`, `"inf"`."""
    value: dict[str, Any] = {"format": FORMAT, **vars(snapshot)}
    if verdict is not None:
        value["verdict"] = verdict.as_json()
    try:
        return json.dumps(value, default=_show, allow_nan=False, check_circular=False)
    except ValueError:
        return json.dumps(_name_numbers(json.loads(json.dumps(value, default=_show))))


def _show(value: Any) -> dict[str, Any]:
    return as_json(value) if isinstance(value, (Value, NotKnown)) else vars(value)


def _name_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _name_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_name_numbers(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def render(snapshot: Snapshot, verdict: Verdict | None, *, all_nodes: bool) -> str:
    """Render text for a terminal or a mail: the most important facts first, then the last lines of
    each node."""
    nodes = snapshot.nodes if all_nodes else choose_nodes(snapshot, verdict)
    shown = verdict.evidence[:NUM_EVIDENCE] if verdict is not None else ()
    is_cancel = verdict is not None and verdict.health is Health.CANCELLED
    # The batch script's lines say once more that somebody ended it.
    errors = (x for x in snapshot.errors if x.rank is not None or not is_cancel)
    others = [line for line in errors if line not in shown]
    is_over = verdict.health in ENDED if verdict is not None else snapshot.record_state == "ended"
    lines = [*_render_head(snapshot, verdict, is_over=is_over), *_render_errors(others)]
    over = {row.id for row in snapshot.scheduler.jobs if row.state not in ("RUNNING", "COMPLETING")}
    for node in nodes:
        exits = (rank.exit for rank in snapshot.ranks if rank.node == node.name)
        how = count_ends((exit.code, exit.stopped) for exit in exits if exit is not None)
        lines += _render_node(node, snapshot.now, how, is_over=is_over or node.name in over)
    num_hidden = len(snapshot.nodes) - len(nodes)
    if num_hidden:
        lines.append(f"and {num_hidden} more nodes; --all shows them")
    if not (is_cancel and nodes):
        lines += _render_script(snapshot)
    lines += _render_items(snapshot)
    lines += _render_settings(snapshot.echoes)
    lines += _render_times(snapshot.progress)
    return "\n".join(map(clean_name, lines))


def choose_nodes(snapshot: Snapshot, verdict: Verdict | None) -> tuple[Node, ...]:
    """Choose the nodes to show: of a large run, those that are blamed, failed or have known lines,
    and the first and last."""
    nodes = snapshot.nodes
    if len(nodes) <= MANY_NODES:
        return nodes
    wanted = [nodes[0].name, nodes[-1].name]
    if verdict is not None:
        wanted += [verdict.node, *(line.node for line in verdict.evidence)]
    if snapshot.outcome is not None:
        wanted.append(snapshot.outcome.culprit_node or "")
    if snapshot.progress is not None:
        wanted.append(snapshot.progress.source.rpartition(".")[0])
    failed = [x.node for x in snapshot.ranks if x.exit and x.exit.code and not x.exit.stopped]
    wanted += [*failed, *(line.node for line in snapshot.errors)]
    chosen = set(list(dict.fromkeys(filter(None, wanted)))[:MANY_NODES])
    return tuple(node for node in nodes if node.name in chosen)


def _render_head(snapshot: Snapshot, verdict: Verdict | None, *, is_over: bool) -> list[str]:
    word = snapshot.state if verdict is None else f"{snapshot.state}  {verdict.health.value}"
    lines = [f"{snapshot.run}  {word}".rstrip()]
    if snapshot.message and not _tells_end(snapshot, verdict):
        lines.append(f"  {fold(snapshot.message)}")
    if verdict is not None:
        lines += _render_verdict(verdict)
    scheduler = snapshot.scheduler
    if scheduler.problem and verdict is None:  # else a remark says so
        age = f"; what follows is {format_duration(scheduler.age_s)} old" if scheduler.jobs else ""
        lines.append(f"  no answer: {fold(scheduler.problem)}{age}")
    lines += [f"  job {_render_job(job)}" for job in scheduler.jobs]
    lines += [f"  joined by job {_render_job(job)}" for job in scheduler.joined]
    if age := format_queue_age(snapshot):
        lines.append(f"  {age}")
    if snapshot.morph:
        lines.append(f"  morphing: {snapshot.morph}")
    if snapshot.morphs:
        count = len(snapshot.morphs)
        times = f" {count} times, last" if count > 1 else ""
        lines.append(f"  morphed{times} {fold(snapshot.morphs[-1])}")
    for name, why in scheduler.lost_nodes.items():
        lines.append(f"  {scheduler.name} calls {name} {fold(why)}")
    if snapshot.world:
        start = f"attempt {snapshot.attempt}, " if snapshot.attempt is not None else ""
        if snapshot.max_restarts:
            start += f"{snapshot.restarts} of {snapshot.max_restarts} restarts used, "
        plural = "s" if snapshot.world != 1 else ""
        lines.append(f"  {start}{snapshot.world} rank{plural}{_count_ends(snapshot)}")
    if snapshot.partition:
        lines.append(f"  partition {snapshot.partition} segments, chosen by Varuna")
    for earlier in snapshot.earlier:
        step = "" if earlier.step is None else f" at step {earlier.step}"
        how = f"{PHRASES[EndCause(earlier.cause)]}; " if earlier.cause else ""
        lines.append(f"  attempt {earlier.number} ended{step}: {how}{fold(earlier.reason)}")
    if snapshot.progress is not None:
        lines.append(f"  {format_progress(snapshot, is_over=is_over)}")
    if snapshot.commit:
        lines.append(f"  commit {clean(snapshot.commit)}")
    lines.append(f"  files {snapshot.folder}")
    return lines


def _tells_end(snapshot: Snapshot, verdict: Verdict | None) -> bool:
    """Return True if the verdict says how the run ended, as its record does."""
    if verdict is None:
        return False
    run_end, end = snapshot.end, verdict.end
    if run_end is None or end is None:
        return verdict.rule in TELLS_RECORD
    return (run_end.cause, run_end.rank, run_end.node) == (end.cause, end.rank, end.node)


def format_queue_age(snapshot: Snapshot) -> str:
    """Format the age of the scheduler's answer: `scheduler asked 12 s ago`; empty if the answer is
    current."""
    scheduler = snapshot.scheduler
    is_live = snapshot.record_state == "submitted" and bool(scheduler.jobs)
    if not is_live or scheduler.problem or scheduler.age_s < 1:
        return ""
    return f"scheduler asked {format_duration(scheduler.age_s)} ago"


def _render_verdict(verdict: Verdict) -> list[str]:
    lines = []
    if verdict.reason:
        lines.append(f"  {fold(verdict.reason)}")
    reason = fold(verdict.reason)
    for line in verdict.evidence[:NUM_EVIDENCE]:
        text = fold(line.text)
        if not reason or (text not in reason and reason not in text):  # else it is read twice
            lines.append(f"    {_place(line)}{line.text}")
    lines += [f"    {fold(fact)}" for fact in verdict.facts]
    if verdict.advice:
        lines.append(f"  next: {fold(verdict.advice)}")
    return lines + [f"  note: {fold(remark)}" for remark in verdict.remarks]


def _render_job(job: JobRow) -> str:
    start = f"expected {job.start}" if job.start else ""
    words = (job.id, job.word or job.state, job.nodes, job.reason, start)
    return "  ".join(clean(word) for word in words if word)


def _count_ends(snapshot: Snapshot) -> str:
    """Count how the ranks ended: `: 1 failed, 5 stopped, 2 left no exit`."""
    exits = [(one.exit.code, one.exit.stopped) for one in snapshot.ranks if one.exit is not None]
    words = count_ends(exits, (snapshot.world or 0) if snapshot.outcome is not None else 0)
    return f": {words}" if words else ""


def format_progress(snapshot: Snapshot, *, is_over: bool) -> str:
    """Format the progress, such as `step 30 of 50, 1.42 s a step (the median of the last 10
    readings), loss 10.1772, 3 s ago`; empty if not known."""
    progress = snapshot.progress
    if progress is None:
        return ""
    words = [progress.name]
    if progress.pace_s is not None:
        a_unit = f"a{'n' * (progress.unit == 'epoch')} {progress.unit}"
        words.append(f"{format_pace(progress.pace_s)} {a_unit} {progress.pace_covers}")
    loss = progress.loss
    if loss is not None:
        words.append(f"loss {loss:.6g}")
    if progress.at is not None:
        more = "more than " * progress.is_older
        words.append(f"{more}{format_duration(snapshot.now - progress.at)} ago")
    if snapshot.phase is not None and not is_over:
        words.append(f"now at a{'n' if snapshot.phase.name[0] in 'aeiou' else ''} "
                     f"{snapshot.phase.name}")  # fmt: skip
    if snapshot.checkpoint_step is not None and snapshot.checkpoint_at is not None:
        age = format_duration(snapshot.now - snapshot.checkpoint_at)
        words.append(f"checkpoint of step {snapshot.checkpoint_step}, {age} old")
    return ", ".join(words)


def _render_errors(errors: Sequence[Line]) -> list[str]:
    if not errors:
        return []
    roots = [line for line in errors if line.kind not in FALLOUT_KINDS]
    lines = ["errors, oldest first"]
    for line in roots[:NUM_ERRORS]:
        more = f"  (x{line.num_same})" if line.num_same > 1 else ""
        lines.append(f"  {_place(line)}{line.text}{more}")
    if len(roots) > NUM_ERRORS:
        lines.append(f"  and {len(roots) - NUM_ERRORS} more; `vjob logs --errors` shows them")
    if rest := [line for line in errors if line.kind in FALLOUT_KINDS]:
        many = sum(line.num_same for line in rest)
        what = f"{many} lines" if many > 1 else "1 line"
        lines.append(f"  {what} from launchers or about the loss of another rank, such as")
        lines.append(f"    {_place(rest[0])}{rest[0].text}")
    return lines


FALLOUT_KINDS = {row.name for row in BUILT_IN.log_rows() if row.proof is Proof.FALLOUT}
"""Kinds of lines that only follow from the end of another rank."""


def _place(line: Line) -> str:
    rank = "" if line.rank is None else f" rank {line.rank}"
    where = f"{line.node or line.file}{rank}"
    return f"{where} | " if where else ""


def _render_node(node: Node, now: float, how: str, *, is_over: bool) -> list[str]:
    """Render a node's last lines below its name; `how` says how its ranks ended."""
    words = []
    if node.ranks:
        first, last = node.ranks[0], node.ranks[-1]
        words.append(f"ranks {first}-{last}" if first != last else f"rank {first}")
    if how or node.phase == "done" or (node.phase and not is_over):
        words.append((how.removeprefix("1 ") if len(node.ranks) == 1 else how) or node.phase)
    alive = max(filter(None, (node.beat_at, node.log_at)), default=None)
    if alive is not None and node.phase != "done":
        words.append(f"{'last seen' if is_over else 'alive'} {format_duration(now - alive)} ago")
    counts = [f"{kind} {count:,} lines" for kind, count in node.num_lines.items()]
    words += counts or [f"{kind} {format_size(size)}" for kind, size in node.sizes.items()]
    lines = [node.name + (f"  ({', '.join(words)})" if words else "")]
    lines += [f"  {clean(check)}" for check in node.checks]
    for kind, shown in (("out", node.out), ("err", node.err)):
        lines += [f"  {kind}  {line}" for line in shown]
    return [*lines, *map(_label_reading, node.gpu)]


def _label_reading(line: str) -> str:
    """Label a line of the GPU log, which is about a GPU or about the node's processors."""
    processors = line.removeprefix(f"[{CPU}]")
    return f"  gpu  {line}" if processors == line else f"  cpu {processors}"


def _render_script(snapshot: Snapshot) -> list[str]:
    """Render the last lines of the batch script, if no rank is to blame."""
    blames_no_rank = snapshot.outcome is not None and snapshot.outcome.culprit_rank is None
    is_bad = snapshot.outcome is not None and snapshot.outcome.code != 0
    if not snapshot.scheduler_lines or (snapshot.nodes and not (blames_no_rank and is_bad)):
        return []
    return ["batch script", *(f"  {line}" for line in snapshot.scheduler_lines)]


def _render_items(snapshot: Snapshot) -> list[str]:
    names = [f"{node.name}.{kind}" for node in snapshot.nodes for kind in sorted(node.sizes)]
    if not names:
        return []
    if len(snapshot.nodes) > MANY_NODES:
        return [f"logs: {len(names):,} of {len(snapshot.nodes):,} nodes"]
    return [f"logs: {' '.join(names)}"]


def _render_settings(echoes: Iterable[Echo]) -> list[str]:
    lines = []
    for echo in echoes:
        differs = echo.wanted is not None and echo.wanted != echo.said
        lines.append(f"  {echo.name}: {echo.said}" + (
            f"   <- {echo.wanted} was asked for ({echo.line.node})" if differs else ""
        ))  # fmt: skip
    return ["settings as the run printed them", *lines] if lines else []


def _render_times(progress: Progress | None) -> list[str]:
    points = [point for point in progress.points if point.step_s is not None] if progress else []
    if progress is None or not points:
        return []
    firsts, what = [point.step for point in points], f"{progress.unit} times"
    if progress.source == COUNTED:
        # The counter has one mean of the steps of a second or more since the point before.
        firsts = [point.step + 1 for point in (progress.points[0], *points)]
        what += ", means over 1 s or more of steps"
    lines = []
    for first, point in zip(firsts, points, strict=False):
        steps = f" {point.step}" if first == point.step else f"s {first} to {point.step}"
        lines.append(f"  {progress.unit}{steps} : {point.step_s:.4f} s")
    return [what, *lines[-NUM_POINTS:]]

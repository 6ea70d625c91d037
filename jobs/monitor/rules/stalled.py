"""Rules for a job that runs: starting, in a checkpoint, stalled, and who holds it up."""

from __future__ import annotations

from varuna_core.records.formatting import format_duration
from vjob.jobs.monitor.log_lines.errors import first_root
from vjob.jobs.monitor.model.snapshot import Snapshot
from vjob.jobs.monitor.model.verdict import Health, Verdict
from vjob.jobs.monitor.rules.base import (
    advise,
    find_life,
    find_started,
    find_step_line,
    is_live,
    join,
    rows_in,
    say_names,
    say_step,
)
from vjob.jobs.monitor.rules.pace import (
    FLOOR_S,
    find_phase,
    find_silence_s,
    find_step_at,
    job_cause_limit_s,
    job_limit_s,
    phase_limit_s,
)
from vjob.jobs.monitor.rules.suspects import (
    SILENT_S,
    describe_gpus,
    find_sure_suspect,
    find_suspect,
)

CONTAINER_S = 3600.0
RENDEZVOUS_S = 1200.0
WARM_UP_S = 1200.0
"""Limits of the phases of a start; agents end a job themselves at shorter ones, as conf says."""
WARM_UP_MOST_S = 3600.0
"""Of warm-up, where the ranks go on writing to their logs."""
QUIET_S = 300.0
"""A log that was not written to for so long is quiet."""
SURE_START_S = 60.0
"""A rank may be stopped so long before the first step."""


def lost_node(snapshot: Snapshot) -> Verdict | None:
    """The scheduler calls a node of the job down, and its beats ended too."""
    if not is_live(snapshot) or not snapshot.scheduler.lost_nodes:
        return None
    for name, word in snapshot.scheduler.lost_nodes.items():
        node = next((item for item in snapshot.nodes if item.name == name), None)
        beat = node.beat_at if node is not None else None
        silence = snapshot.now - beat if beat is not None else None
        if silence is not None and silence < SILENT_S:
            continue  # the controller alone does not reach it, or it came back
        quiet = f", no sign of life for {format_duration(silence)}" if silence is not None else ""
        return Verdict(
            health=Health.DEAD,
            rule="lost node",
            reason=f"node {name} was lost: the scheduler calls it {word}{quiet}",
            facts=_facts(snapshot),
            advice=join(
                ["submit again without it (cluster.exclude)", advise(snapshot, "cancel JOB")], "; "
            ),
            node=name,
        )
    return None


def held_up(snapshot: Snapshot) -> Verdict | None:
    """A rank is stopped or dead, and a step is late already."""
    suspect = find_sure_suspect(snapshot)
    if suspect is None or not is_live(snapshot):
        return None
    silence = find_silence_s(snapshot)
    if silence is None:
        started = find_started(snapshot)
        silence = snapshot.now - started if started is not None else 0.0
        limit = SURE_START_S
    else:
        limit = job_cause_limit_s(snapshot)
    if silence <= limit:
        return None
    return Verdict(
        health=Health.STALLED,
        rule="held up",
        reason=f"{suspect.reason}; no step for {format_duration(silence)} "
        f"(limit {format_duration(limit)}), after {say_step(snapshot)}",
        evidence=tuple(x for x in (find_step_line(snapshot),) if x is not None),
        facts=_facts(snapshot),
        advice=join([suspect.remedy, advise(snapshot, "stacks JOB")], "; "),
        node=suspect.node,
        rank=suspect.rank,
    )


def in_phase(snapshot: Snapshot) -> Verdict | None:
    """A checkpoint or an evaluation, as long as it may take."""
    phase = find_phase(snapshot) if is_live(snapshot) else None
    if phase is None:
        return None
    age = snapshot.now - phase.since if phase.since is not None else None
    limit = phase_limit_s(snapshot, phase.name)
    longest = snapshot.phases_s.get(phase.name)
    usual = (
        f"the longest so far took {format_duration(longest)}" if longest else "the first of the run"
    )
    since = f" for {format_duration(age)}" if age is not None else ""
    if age is not None and age > limit:
        suspect = find_suspect(snapshot)
        who = f"; {suspect.reason}" if suspect is not None else ""
        return Verdict(
            health=Health.STALLED,
            rule="in phase",
            reason=f"in {_article(phase.name)}{since}, the limit is {format_duration(limit)}{who}",
            evidence=(phase.line,),
            facts=(usual, *_facts(snapshot)),
            advice=advise(snapshot, "stacks JOB"),
            node=suspect.node if suspect is not None else "",
            rank=suspect.rank if suspect is not None else None,
        )
    is_checkpoint = phase.name == "checkpoint"
    return Verdict(
        health=Health.CHECKPOINTING if is_checkpoint else Health.HEALTHY,
        rule="in phase",
        reason=f"in {_article(phase.name)}{since}, after {say_step(snapshot)}; {usual}",
        evidence=(phase.line,),
    )


def stalled(snapshot: Snapshot, floor_s: float = FLOOR_S) -> Verdict | None:
    """No step for longer than the job's own steps allow."""
    silence = find_silence_s(snapshot)
    if silence is None or not is_live(snapshot):
        return None
    limit = job_limit_s(snapshot, floor_s)
    if silence <= limit:
        return None
    suspect = find_suspect(snapshot)
    gpus = describe_gpus(snapshot)
    root = first_root(snapshot.errors) or find_step_line(snapshot)
    who = suspect.reason if suspect is not None else gpus
    facts = [fact for fact in (gpus if suspect is not None else "", *_facts(snapshot)) if fact]
    return Verdict(
        health=Health.STALLED,
        rule="stalled",
        reason=f"no step for {format_duration(silence)} after {say_step(snapshot)} (limit "
        f"{format_duration(limit)})" + (f": {who}" if who else ""),
        evidence=(root,) if root is not None else (),
        facts=tuple(facts),
        advice=join(
            [
                suspect.remedy if suspect is not None else "",
                advise(snapshot, "stacks JOB", "logs JOB --errors"),
            ],
            "; ",
        ),
        node=suspect.node if suspect is not None else "",
        rank=suspect.rank if suspect is not None else None,
    )


def starting(snapshot: Snapshot) -> Verdict | None:
    """No step yet: the nodes boot, prepare the container, meet, or the ranks warm up."""
    if rows_in(snapshot, ("CONFIGURING",)) and snapshot.attempt is None:
        return Verdict(
            health=Health.STARTING, rule="starting", reason="the scheduler makes its nodes ready"
        )
    if not is_live(snapshot) and not rows_in(snapshot, ("RUNNING",)):
        return None
    if find_step_at(snapshot) is not None or snapshot.progress is not None:
        return None
    phase, what, limit, begun = _start_phase(snapshot)
    age = snapshot.now - begun if begun is not None else None
    since = f" for {format_duration(age)}" if age is not None else ""
    if age is not None and age > limit:
        if phase == "warm-up":
            late = _late_warm_up(snapshot, age, since)
            if late is not None:
                return late
        else:
            return _late_start(snapshot, f"{what}{since}, the limit is {format_duration(limit)}")
    return Verdict(
        health=Health.STARTING,
        rule="starting",
        phase=phase,
        reason=f"{what}{since}",
        facts=_start_facts(snapshot),
    )


def _start_phase(snapshot: Snapshot) -> tuple[str, str, float, float | None]:
    """Its name, a sentence, its limit, and when it began."""
    begun = find_started(snapshot)
    if snapshot.went_at is not None:
        return "warm-up", "the ranks started and did no step yet", WARM_UP_S, begun
    phases = {node.name: node.phase for node in snapshot.nodes}
    preparing = [name for name, phase in phases.items() if phase == "container"]
    if preparing:
        what = f"{say_names(preparing)} prepare(s) the container"
        return "container", what, CONTAINER_S, begun
    if any(phase in ("running", "done") for phase in phases.values()) or snapshot.ranks:
        return "warm-up", "the ranks started and did no step yet", WARM_UP_S, begun
    if not any(phases.values()) and any(node.log_at is not None for node in snapshot.nodes):
        return "warm-up", "no step was told yet", WARM_UP_S, begun
    missing = (snapshot.num_nodes or 0) - sum(1 for phase in phases.values() if phase)
    what = "the nodes meet"
    if missing > 0:
        what = f"{missing} of {snapshot.num_nodes} nodes have not reported"
    return "rendezvous", what, RENDEZVOUS_S, begun


def _late_start(snapshot: Snapshot, reason: str) -> Verdict:
    suspect = find_suspect(snapshot)
    who = f": {suspect.reason}" if suspect is not None else ""
    return Verdict(
        health=Health.STALLED,
        rule="starting",
        reason=reason + who,
        facts=_start_facts(snapshot),
        advice=advise(snapshot, "stacks JOB", "logs JOB"),
        node=suspect.node if suspect is not None else "",
        rank=suspect.rank if suspect is not None else None,
    )


def _late_warm_up(snapshot: Snapshot, age: float, since: str) -> Verdict | None:
    """A job that prints no step that we know is well as long as it shows life otherwise."""
    log_at = max((node.log_at for node in snapshot.nodes if node.log_at is not None), default=None)
    quiet = snapshot.now - log_at if log_at is not None else age
    works = _is_working(snapshot)
    steps_are_told = snapshot.num_gpus is not None and bool(snapshot.info)
    if quiet <= QUIET_S or works:
        if steps_are_told and age > WARM_UP_MOST_S and not works:
            return _late_start(snapshot, f"the ranks started and did no step{since}")
        return Verdict(
            health=Health.HEALTHY,
            rule="starting",
            reason=f"it runs{since} and prints no step that vjob knows; the last output is "
            f"{format_duration(quiet)} old",
            facts=_start_facts(snapshot),
        )
    return _late_start(
        snapshot,
        f"the ranks started and did no step{since}, the logs are quiet {format_duration(quiet)}",
    )


def _is_working(snapshot: Snapshot) -> bool:
    """GPUs or ranks that compute, and not all of them at 100 % without an end."""
    used = [
        gpu.utilization
        for node in snapshot.nodes
        for gpu in node.gpus
        if gpu.index != "cpu" and gpu.utilization is not None
    ]
    if used:
        return max(used) > 5 and not describe_gpus(snapshot)
    return any((rank.cpu_percent or 0) > 20 for rank in snapshot.ranks)


def _facts(snapshot: Snapshot) -> tuple[str, ...]:
    facts = []
    life = find_life(snapshot)
    if life is not None:
        facts.append(
            f"the last sign of life of any node is {format_duration(snapshot.now - life)} old"
        )
    if snapshot.checkpoint_step is not None:
        facts.append(f"the last checkpoint is of step {snapshot.checkpoint_step}")
    return tuple(facts)


def _start_facts(snapshot: Snapshot) -> tuple[str, ...]:
    by_phase: dict[str, int] = {}
    for node in snapshot.nodes:
        if node.phase:
            by_phase[node.phase] = by_phase.get(node.phase, 0) + 1
    said = ", ".join(f"{count} {phase}" for phase, count in by_phase.items())
    return (f"nodes: {said}",) if said else ()


def _article(name: str) -> str:
    return f"an {name}" if name[:1] in "aeiou" else f"a {name}"

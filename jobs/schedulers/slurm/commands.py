"""Slurm's commands as pairs: build the command line, parse its output. Runs nothing.

Text formats (`-O "Name:|"`, `-P`) are stable from Slurm 20.11 to 26.05; the JSON ones are not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from varuna_core.facts.cause import EndCause
from varuna_core.facts.known import Evidence, Known, NotKnown, Value
from varuna_core.records.files import as_whole
from vjob.jobs.errors import UncertainError
from vjob.jobs.schedulers.job import (
    END_CAUSES,
    NOTHING,
    OVER,
    After,
    JobState,
    SchedulerJob,
    StartEstimate,
    parse_name,
)
from vjob.jobs.schedulers.node_names import expand_nodes
from vjob.jobs.schedulers.reasons import NO_OUTPUT

COMMENT_PREFIX = "vjob:"
AWAY = "unable to contact slurm controller"
"""Part of every tool's error message, in lower case, while the controller does not answer."""


ALIASES = {
    "REQUEUE_HOLD": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "STAGE_OUT": JobState.COMPLETING,
    "SIGNALING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "STOPPED": JobState.SUSPENDED,
    "REVOKED": JobState.CANCELLED,
    "LAUNCH_FAILED": JobState.PENDING,  # requeued and held
}


NOT_IN_ACCOUNTING = NotKnown("accounting does not report it")
PASSED = "INVALID"
"""Value of squeue's TimeLeft for a job that continues beyond its time limit."""
NO_NODES = ("", "(null)", "None", "None assigned")
_NO_OUTPUT = re.compile(r"RaisedSignal:53\b")
"""slurmd's reason if it could not create the output file: its error code 4021 & 127."""
_NO_LAUNCH = re.compile(r"JobLaunchFailure|launch.failed")


def build_job(
    job: str,
    word: str,
    *,
    nodes: str,
    reason: str,
    start: str,
    exit_code: str = "",
    comment: str = "",
    restarts: int = 0,
    left: Known[float] = NOT_IN_ACCOUNTING,
    limit: Known[float] = NOT_IN_ACCOUNTING,
    end: str = "",
    preempted: str = "",
    dependency: str = "",
) -> SchedulerJob:
    """Build a job from the fields of one row that squeue, sacct or scontrol printed."""
    text, state = parse_reason(reason), parse_state(word)
    took = parse_date(preempted)
    numbers = re.fullmatch(r"(\d{1,9}):(\d{1,9})", exit_code)
    is_told = numbers is not None and state in OVER  # 0:0 while it goes on
    status, number = (int(numbers[1]), int(numbers[2])) if numbers and is_told else (None, None)
    return SchedulerJob(
        id=job,
        state=state,
        native_word=word,
        nodes=() if nodes in NO_NODES else tuple(expand_nodes(nodes)),
        reason_text=text,
        comment=comment,
        restarts=restarts,
        code=status,
        signal=number,
        start=parse_date(start),
        left=left,
        time_limit=limit,
        ends=parse_date(end),
        preempted=took,
        dependency="" if dependency == "(null)" else dependency,
        end_cause=judge_end(state, word, text, number, is_preempted=took is not None),
    )


def judge_end(
    state: JobState, word: str, reason: str, number: int | None, *, is_preempted: bool
) -> EndCause | None:
    """Return the end cause according to Slurm alone. A FAILED job that was preempted counts as
    preempted, since Slurm reports FAILED if the batch script exits during the grace time."""
    if state not in OVER:
        return None
    if state is JobState.FAILED and is_preempted:
        return EndCause.PREEMPTED
    if state is JobState.FAILED and number:  # Slurm calls that a launch failure too
        return EndCause.NO_OUTPUT if number == NO_OUTPUT else EndCause.BATCH_KILLED
    if _NO_OUTPUT.match(reason):
        return EndCause.NO_OUTPUT
    if _NO_LAUNCH.match(reason):
        return EndCause.LAUNCH_FAILED
    return EndCause.REVOKED if word.startswith("REVOKED") else END_CAUSES.get(state)


def parse_date(text: str) -> float | None:
    """Parse Slurm's local time, `2026-11-23T13:18:48`; return None for Unknown, N/A and None."""
    try:
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def parse_left(text: str, source: str) -> Known[float]:
    """Parse Slurm's time as a known value; any other text is not known, with Slurm's word as
    evidence."""
    seconds = parse_time(text)
    if seconds is not None:
        return Value(seconds, (Evidence(source, text=text.strip()),))
    word = text.strip()
    if word == "UNLIMITED":
        return NotKnown("the job has no time limit", (Evidence(source, text=word),))
    return NotKnown(f"{source} says {word or 'nothing'}", (Evidence(source, text=word),))


def parse_state(word: str) -> JobState:
    """Parse a state such as `CANCELLED by 0`, `CANCELLED+` or `RUNNING`."""
    match = re.match(r"[A-Z_]+", word.strip())
    key = match.group(0) if match else ""
    return ALIASES.get(key) or parse_name(key)


def build_sbatch_command(
    script: str,
    folder: str,
    *,
    test_only: bool = False,
    after: After = NOTHING,
    expedite: bool = False,
) -> list[str]:
    """Build the sbatch command. `expedite` restarts without queueing a job whose node fails."""
    command = ["sbatch", "--parsable", f"--chdir={folder}"]
    if test_only:
        command.append("--test-only")
    kinds = {"after": after.started, "afterok": after.succeeded, "afterany": after.ended}
    waits = [f"{kind}:{':'.join(jobs)}" for kind, jobs in kinds.items() if jobs]
    if waits:
        command.append(f"--dependency={','.join(waits)}")
    if after.succeeded:
        command.append("--kill-on-invalid-dep=yes")  # else it pends for ever
    if expedite:
        command.append("--requeue=expedite")  # over the script's own --requeue
    return [*command, script]


EXPEDITES = "enable_expedited_requeue"


def can_expedite(facts: Mapping[str, str]) -> bool:
    """Return True if the cluster supports expedited requeue: from Slurm 25.11, if enabled."""
    match = re.search(r"(\d{1,9})\.(\d{1,9})", facts.get("SLURM_VERSION", ""))
    is_new = match is not None and (int(match[1]), int(match[2])) >= (25, 11)
    return is_new and EXPEDITES in facts.get("SlurmctldParameters", "").split(",")


def parse_sbatch_output(text: str) -> str:
    """Parse the job id from `--parsable` output: `12` or `12;cluster`, perhaps after warnings."""
    for line in reversed(text.strip().splitlines()):
        match = re.fullmatch(r"(\d+)(;\S+)?", line.strip())
        if match:
            return match.group(1)
    raise UncertainError(
        f"sbatch printed no job id: {text.strip()[:200]!r}\n"
        "  `vjob list` adopts the job if one was made"
    )


def build_squeue_command(user: int) -> list[str]:
    """Build the squeue command for all jobs of a user, so that one query serves all callers.

    Without the user, squeue would load the jobs of all users. `--local` saves a request about the
    federation; two requests remain, one of them about partitions.
    """
    fields = "JobArrayID,HetJobID,HetJobOffset,State,NodeList,Reason,RestartCnt,StartTime,Comment"
    last = "TimeLeft,TimeLimit,EndTime,PreemptTime,Dependency,exit_code"  # behind any comment
    layout = ",".join(f"{name}:|" for name in f"{fields},{last}".split(","))
    command = ["squeue", "--noheader", "--array", "--local", "--states=all"]
    return [*command, f"--user={user}", "-O", layout]


def parse_squeue_output(text: str, jobs: Collection[str] | None = None) -> list[SchedulerJob]:
    """Parse squeue's rows to jobs; with `jobs`, only to these.

    Each component is one row. Fields end with `|`, so that none of them is truncated.
    """
    found = []
    for job, cells in _read_queue(text, jobs).items():
        word, nodes, reason, restarts, start = (x.strip() for x in cells[3:8])
        *words, left, limit, end, preempted, depends, status, _ = cells[8:]
        comment = "|".join(words).rstrip("|").strip()
        found.append(
            build_job(
                job,
                word,
                nodes=nodes,
                reason=reason,
                comment="" if comment == "(null)" else comment,
                restarts=as_whole(restarts) or 0,
                start=start,
                left=parse_left("0:00" if left.strip() == PASSED else left, "squeue"),
                limit=parse_left(limit, "squeue"),
                end=end,
                preempted=preempted,
                dependency=depends.strip(),
                exit_code=format_status(status),
            )
        )
    return found


def parse_queue_states(text: str) -> dict[str, str]:
    """Return Slurm's state words for all jobs and components in squeue's rows, keyed by id."""
    return {job: cells[3].strip() for job, cells in _read_queue(text, None).items()}


def _read_queue(text: str, jobs: Collection[str] | None) -> dict[str, list[str]]:
    """Return the cells of each job or component, from its first row if there are several."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) < 16:
            continue
        job, het, offset = (x.strip() for x in cells[:3])
        is_het = het.isdecimal() and het != "0" and offset.isdecimal()
        if jobs is None or (het if is_het else job.partition("+")[0]) in jobs:
            found.setdefault(f"{het}+{offset}" if is_het else job, cells)
    return found


def format_status(text: str) -> str:
    """Format squeue's exit code, which is a wait status, as the other tools do: `256` is `1:0`."""
    number = int(text) if re.fullmatch(r" *\d{1,9} *", text) else None
    return text.strip() if number is None else f"{number >> 8}:{number & 0x7F}"


def parse_reason(text: str) -> str:
    """Return the reason without the parentheses that some layouts add; empty for `None`."""
    text = text.strip()
    bare = text[1:-1] if text[:1] == "(" and text[-1:] == ")" else text
    return "" if bare == "None" else bare


def has_only_state(version: str) -> bool:
    """Return True if this version of squeue (`slurm 24.05.1`) has --only-job-state."""
    match = re.search(r"(\d{1,9})\.(\d{1,9})", version)
    return match is not None and (int(match[1]), int(match[2])) >= (24, 5)


def build_states_command(jobs: Sequence[str]) -> list[str]:
    """Build the squeue command for only the states of these jobs. It cannot be combined with
    `--user` (fatal from 25.05)."""
    command = ["squeue", "--noheader", "--array", "--only-job-state", "--states=all"]
    return [*command, "--jobs=" + ",".join(jobs), "-o", "%i|%T"]


def parse_states(text: str) -> dict[str, str]:
    """Parse the state words, keyed by job or component."""
    rows = [line.partition("|") for line in text.splitlines() if "|" in line]
    return {job.strip(): word.strip() for job, _, word in rows}


def parse_time(text: str) -> float | None:
    """Parse `1-02:03:04` to seconds; return None for UNLIMITED, INVALID and any other text."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?((?:\d{1,9}:){0,2}\d{1,9})", text.strip())
    if match is None:
        return None
    seconds = 0
    for part in match[2].split(":"):
        seconds = 60 * seconds + int(part)
    return float(86400 * int(match[1] or 0) + seconds)


_ESTIMATE = re.compile(
    r"to start at (?P<start>\S+)(?: using (?P<cpus>\d{1,9}) processors)?"
    r"(?: on (?:nodes? )?(?P<nodes>\S+))?(?: in partition (?P<queue>\S+))?"
)


def parse_estimate(text: str) -> StartEstimate:
    """Parse the output of `sbatch --test-only`: `sbatch: Job 7 to start at 2026-11-23T01:12:00
    using 4 processors on nodes a[1-2] in partition gpu1`, in the submitting machine's local
    time."""
    match = _ESTIMATE.search(text)
    if match is None:
        return StartEstimate(text=text)
    return StartEstimate(
        text=text,
        is_read=True,
        start=parse_date(match["start"]),
        num_cpus=int(match["cpus"]) if match["cpus"] else None,
        nodes=tuple(expand_nodes(match["nodes"] or "")),
        queue=match["queue"] or "",
    )


def build_show_job_command(job: str) -> list[str]:
    """Build the command for one job with all components: the cheapest query, a single request to
    the controller."""
    return ["scontrol", "--local", "-o", "show", "job", job]


def parse_show_job_output(text: str) -> list[SchedulerJob]:
    """Parse lines of `Key=Value` words, one line per component; of several lines of a component,
    use the first."""
    found: dict[str, SchedulerJob] = {}
    for line in text.splitlines():
        facts = dict(re.findall(r"(?:^|\s)([A-Z][\w/:-]*)=(\S*)", line))
        if "JobId" not in facts:
            continue
        het, offset = facts.get("HetJobId", ""), facts.get("HetJobOffset", "")
        job, index = facts["JobId"], facts.get("ArrayTaskId", "")
        if index.isdecimal():  # of one that pends as part of the whole it is a range
            job = f"{facts.get('ArrayJobId', job)}_{index}"
        if het.isdecimal() and offset:
            job = f"{het}+{offset}"
        if job in found:
            continue
        limit = left = parse_left(facts.get("TimeLimit", ""), "scontrol")
        if isinstance(limit, Value):
            run_s = parse_time(facts.get("RunTime", "")) or 0.0
            left = replace(limit, value=max(0.0, limit.value - run_s))
        found[job] = build_job(
            job,
            facts.get("JobState", ""),
            nodes=facts.get("NodeList", ""),
            reason=facts.get("Reason", "").replace("_", " "),
            comment=facts.get("Comment", ""),
            restarts=as_whole(facts.get("Restarts", "")) or 0,
            exit_code=facts.get("ExitCode", ""),
            start=facts.get("StartTime", ""),
            left=left,
            limit=limit,
            end=facts.get("EndTime", ""),
            preempted=facts.get("PreemptTime", ""),
            dependency=facts.get("Dependency", ""),
        )
    return list(found.values())


def build_sacct_command(jobs: Sequence[str]) -> list[str]:
    """Build the sacct command for these jobs; -X excludes steps."""
    fields = "JobID,State,NodeList,Reason,ExitCode,Start,End,Timelimit,Comment"
    return ["sacct", "-n", "-P", "-X", "-o", fields, "-j", ",".join(jobs)]


def parse_sacct_output(text: str) -> list[SchedulerJob]:
    """Parse lines of sacct, such as `26+0|COMPLETED|a[1-2]|None|0:0|...`, skipping steps; of
    several lines of a job, use the first."""
    found: dict[str, SchedulerJob] = {}
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) < 9 or "." in cells[0] or cells[0] in found:
            continue
        found[cells[0]] = build_job(
            cells[0],
            cells[1],
            nodes=cells[2],
            reason=cells[3],
            exit_code=cells[4],
            start=cells[5],
            end=cells[6],
            limit=parse_left(cells[7], "sacct"),
            comment="|".join(cells[8:]),
        )
    return list(found.values())


def build_earlier_command(job: str) -> list[str]:
    """Build the sacct command that lists each start of a requeued job, oldest first."""
    return ["sacct", "-n", "-P", "-X", "-D", "-o", "JobID,State", "-j", job]


def parse_earlier(text: str) -> dict[str, tuple[EndCause, ...]]:
    """Parse the end of each start of each job or component, skipping starts that still run."""
    found: dict[str, tuple[EndCause, ...]] = {}
    for line in text.splitlines():
        job, _, word = line.partition("|")
        state = parse_state(word)
        if state is JobState.REQUEUED:
            found[job] = (*found.get(job, ()), EndCause.REQUEUED)
        elif state in OVER:
            cause = END_CAUSES.get(state, EndCause.UNKNOWN)
            found[job] = (*found.get(job, ()), cause)
    return found


def parse_canceller(text: str) -> int | None:
    """Parse the user id in sacct's `CANCELLED by 1000`; return None if there is none."""
    match = re.search(r"\|CANCELLED by (\d{1,10})\|", text)
    return int(match[1]) if match else None


def build_scancel_command(job: str) -> list[str]:
    return ["scancel", job]


def build_steps_command(job: str) -> list[str]:
    """Build the squeue command for a job's running steps and their names."""
    return ["squeue", "--steps", "--noheader", "--local", f"--jobs={job}", "-o", "%i|%j"]


def parse_steps(text: str, names: Collection[str]) -> list[str]:
    """Return the ids of the steps that have one of these names."""
    rows = [line.partition("|") for line in text.splitlines()]
    return [step.strip() for step, _, name in rows if name.strip() in names]


def build_requeue_command(job: str) -> list[str]:
    """Build the command that requeues a job. For a het job, `job` is the leader's id, since
    components cannot be requeued separately."""
    return ["scontrol", "requeue", job]


def build_beside_command(
    job: str,
    parts: Sequence[tuple[int | None, int]],
    group: str,
    command: Sequence[str],
    names: Sequence[str] = (),
) -> list[str]:
    """Build a step beside the job's own step, with one task on each node, that takes none of the
    job's resources.

    `parts` are pairs of component (None outside het jobs) and number of nodes; `names` are the
    nodes, if not all nodes of the job.
    """
    shared = [
        "--overlap",  # from 20.11 on a step has its CPUs alone
        "--mem=0",  # all of the job's: the other step has it, and this one would wait for it
        "--gres=none",
        "--cpu-bind=none",
        "--input=/dev/null",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        f"--export=ALL,VJOB_GROUP={group}",
        "--ntasks-per-node=1",
        *([f"--nodelist={','.join(names)}"] if names else []),
    ]
    words = ["srun", f"--jobid={job}"]
    for number, (component, nodes) in enumerate(parts):
        words += [":"] if number else []
        words += [] if component is None else [f"--het-group={component}"]
        words += [*shared, f"--nodes={nodes}", f"--ntasks={nodes}", *command]
    return words


def build_shell_command(
    job: SchedulerJob, host: str, group: str, command: Sequence[str], *, tty: bool
) -> list[str]:
    """Build a step on one node beside the job's own, whose resources it shares by --overlap."""
    words = ["srun", f"--jobid={job.leader}"]
    words += [f"--het-group={job.component}"] if "+" in job.id else []
    words += ["--overlap", "--mem=0", "--cpu-bind=none", "--nodes=1", "--ntasks=1"]
    words += [f"--nodelist={host}", f"--export=ALL,VJOB_GROUP={group}"]
    return [*words, *(["--pty"] if tty else []), *command]

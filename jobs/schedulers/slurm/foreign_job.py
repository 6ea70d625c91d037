"""Jobs that vjob did not submit, as Slurm reports them.

JOB ─► scontrol show job (one request, shared by all commands) ─► parts, one a component or
   └─► sacct, once the controller has forgotten it                 element: state, nodes, files
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from varuna_core.records.files import as_whole
from vjob.jobs.errors import UncertainError
from vjob.jobs.schedulers import broker
from vjob.jobs.schedulers.base import FLOOR_S, SELDOM_S
from vjob.jobs.schedulers.foreign_job import ForeignJob, JobPart
from vjob.jobs.schedulers.job import OVER, JobState, SchedulerJob
from vjob.jobs.schedulers.slurm import commands as slurm

NAME = "slurm"
JOB = re.compile(r"(\d{1,10})(?:_(\d{1,10})|\+(\d{1,4}))?")
"""Job ids: 12, 12_3 for an array task, 12+1 for a component of a het job."""
NO_TASK = 4294967294
"""Number that Slurm substitutes for `%a` outside job arrays."""
_KEY = re.compile(r"\s(?=[A-Z][A-Za-z/:]*=)")
_USER = re.compile(r" UserId=(\S+)\((\d+)\) GroupId=")
_PATTERN = re.compile(r"%(\d{0,2})([%AabjJNnstux])")


def ask_slurm_job(word: str) -> ForeignJob | None:
    """Return the job with this id; None if `word` is not an id, or Slurm knows no such job.

    Raise UncertainError if the controller does not answer and accounting does not show that the job
    is over.
    """
    if JOB.fullmatch(word) is None:
        return None
    away: UncertainError | None = None
    try:
        answer = broker.ask(slurm.build_show_job_command(word), floor_s=FLOOR_S)
        parts = sorted(parse_parts(answer.text), key=_read_place)
        if parts:
            return ForeignJob(scheduler=NAME, word=word, parts=tuple(parts), asked=answer.known)
    except UncertainError as error:
        away = error
    try:
        answer = broker.ask(build_sacct_command(word), floor_s=SELDOM_S)
        parts = parse_sacct_parts(answer.text)
    except UncertainError:
        parts = []
    if away is not None and not (parts and all(part.info.state in OVER for part in parts)):
        raise away
    if not parts:
        return None
    how = "has forgotten the job" if away is None else "does not answer"
    note = f"Slurm's controller {how}; accounting does not say where the job's output went"
    guessed = [guess_output(part) for part in parts]
    if any(part.out for part in guessed):
        note += ", so files with sbatch's default names are shown"
    return ForeignJob(
        scheduler=NAME, word=word, parts=tuple(guessed), asked=answer.known, notes=(note,)
    )


def _read_place(part: JobPart) -> tuple[int, int]:
    _, _, index = part.info.id.partition("_")
    return part.info.component, as_whole(index) or 0


def parse_parts(text: str) -> list[JobPart]:
    """Parse `scontrol -o show job`: one line per part, with values that may contain spaces."""
    found = []
    for line in text.splitlines():
        infos = slurm.parse_show_job_output(line)
        if not infos:
            continue
        facts: dict[str, str] = {}
        for word in _KEY.split(line):
            key, _, value = word.partition("=")
            facts[key] = value.strip()
        users = _USER.findall(line)  # a job's name may hold such words too
        is_sure = len(users) == 1
        part = JobPart(
            info=_drop_future(infos[0]),
            raw_id=_find_raw_id(line),
            name=facts.get("JobName", ""),
            user=users[0][0] if is_sure else "",
            uid=as_whole(users[0][1]) if is_sure else None,
            queue=facts.get("Partition", ""),
            submitted=slurm.parse_date(facts.get("SubmitTime", "")),
            started=_find_start(infos[0], facts),
            ended=slurm.parse_date(facts.get("EndTime", "")) if infos[0].state in OVER else None,
            limit_s=slurm.parse_time(facts.get("TimeLimit", "")),
            work_dir=facts.get("WorkDir", ""),
            num_nodes=_parse_count(facts.get("NumNodes", "")),
            has_gpus=any("gpu" in facts.get(key, "") for key in ("TRES", "TresPerNode", "Gres")),
        )
        out, err = facts.get("StdOut", ""), facts.get("StdErr", "")
        found.append(replace(part, out=expand_pattern(out, part), err=expand_pattern(err, part)))
    return found


def _drop_future(info: SchedulerJob) -> SchedulerJob:
    """Clear the reason of a running job, since it explains the wait before the start."""
    return replace(info, reason_text="") if info.state is JobState.RUNNING else info


def _find_raw_id(line: str) -> str:
    match = re.match(r"JobId=(\d+)", line)
    return match[1] if match else ""


def _find_start(info: SchedulerJob, facts: dict[str, str]) -> float | None:
    """Return the start time; None before the start, when Slurm's time is only an estimate."""
    if info.state in (JobState.PENDING, JobState.CONFIGURING, JobState.REQUEUED):
        return None
    return slurm.parse_date(facts.get("StartTime", ""))


def _parse_count(text: str) -> int | None:
    match = re.match(r"\d+", text)
    return as_whole(match[0]) if match else None


def expand_pattern(path: str, part: JobPart) -> str:
    """Return the path of the batch script's output, with sbatch's `%j` and other patterns replaced.

    The controller has replaced some patterns already, depending on its version. Return an empty
    path if a value, such as the node, is not known yet. A backslash in the path disables patterns.
    """
    if path in ("", "(null)", "/dev/null"):
        return ""
    if "\\" in path:
        path = path.replace("\\", "")
        return path if path.startswith("/") else os.path.join(part.work_dir, path)
    job, _, index = part.info.id.partition("_")
    nodes = part.info.nodes
    task = as_whole(index)
    known = {
        "%": "%",
        "A": job if task is not None else part.raw_id,
        "a": str(NO_TASK if task is None else task),
        "b": str((NO_TASK if task is None else task) % 10),
        "j": part.raw_id,
        "J": part.raw_id,
        "N": nodes[0].partition(".")[0] if nodes else "",
        "n": "0",
        "s": "batch",
        "t": "0",
        "u": part.user,
        "x": part.name,
    }
    missing = [letter for _, letter in _PATTERN.findall(path) if not known[letter]]
    if missing:
        return ""

    def put(match: re.Match[str]) -> str:
        value = known[match[2]]
        return value.zfill(min(int(match[1] or 0), 10)) if value.isdecimal() else value

    shown = _PATTERN.sub(put, path)
    return shown if shown.startswith("/") else os.path.join(part.work_dir, shown)


def build_sacct_command(job: str) -> list[str]:
    """Build the sacct command for a job that the controller has forgotten. The job's name is the
    last field, since a name may contain separators."""
    fields = "JobID,JobIDRaw,State,NodeList,Reason,ExitCode,User,UID,Partition,Submit,Start,End"
    layout = f"{fields},Timelimit,NNodes,WorkDir,JobName"
    return ["sacct", "-n", "-P", "-X", "-o", layout, "-j", job]


def parse_sacct_parts(text: str) -> list[JobPart]:
    found = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) < 16 or "." in cells[0] or not cells[0][:1].isdecimal():
            continue
        found.append(
            JobPart(
                info=slurm.build_job(
                    cells[0],
                    cells[2],
                    nodes=cells[3],
                    reason=cells[4],
                    exit_code=cells[5],
                    start=cells[10],
                    end=cells[11],
                    limit=slurm.parse_left(cells[12], "sacct"),
                ),
                raw_id=cells[1],
                user=cells[6],
                uid=as_whole(cells[7]),
                queue=cells[8],
                submitted=slurm.parse_date(cells[9]),
                started=slurm.parse_date(cells[10]),
                ended=slurm.parse_date(cells[11]),
                limit_s=slurm.parse_time(cells[12]),
                num_nodes=_parse_count(cells[13]),
                work_dir=cells[14],
                name="|".join(cells[15:]),
            )
        )
    return found


def guess_output(part: JobPart) -> JobPart:
    """Return the part with sbatch's default output file, if that file exists; else unchanged."""
    job, _, index = part.info.id.partition("_")
    name = f"slurm-{job}_{index}.out" if index.isdecimal() else f"slurm-{part.raw_id}.out"
    path = os.path.join(part.work_dir, name)
    return replace(part, out=path, err=path) if part.work_dir and os.path.exists(path) else part

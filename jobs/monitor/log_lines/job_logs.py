"""`vjob logs` for a Slurm job that vjob did not submit: print or follow its output files."""

from __future__ import annotations

import math
import time
from pathlib import Path

from varuna_core.records.files import open_file
from vjob.jobs.errors import InputError, UncertainError
from vjob.jobs.monitor.log_lines.print_logs import (
    LOOK_S,
    POLL_S,
    LineFilter,
    Say,
)
from vjob.jobs.monitor.log_lines.stream import Log, merge_lines
from vjob.jobs.runs.foreign_job import ask_again
from vjob.jobs.schedulers.foreign_job import ForeignJob
from vjob.jobs.schedulers.job import JobState


def find_job_logs(job: ForeignJob, wanted: LineFilter, num_lines: int | None = None) -> list[Log]:
    """Return the requested logs; here `--node` names a part of the job, such as 12_3."""
    if wanted.ranks:
        raise InputError(f"vjob did not submit {job.word}: log lines do not show ranks")
    return [
        Log(Path(path), name, num_lines=num_lines, is_err=kind == "err")
        for name, files in job.files.items()
        for kind, path in files.items()
        if kind in wanted.kinds and wanted.nodes in ((), (name,))
    ]


def explain_no_logs(job: ForeignJob) -> str:
    """Explain why there is nothing to print."""
    if all(part.started is None for part in job.parts):
        part = job.parts[0]
        why = f" ({part.info.reason_text})" if part.info.reason_text else ""
        return f"job {job.word} is {part.info.native_word}{why} and has printed nothing yet"
    if job.notes:
        return f"{job.notes[0]}; look in {job.parts[0].work_dir or 'the folder of its sbatch'}"
    return f"Slurm names no output file for job {job.word} (interactive, or /dev/null)"


def print_job_logs(job: ForeignJob, say: Say, wanted: LineFilter, *, num_lines: int | None) -> None:
    """Print all present lines."""
    logs = find_job_logs(job, wanted, num_lines)
    if not logs:
        say(explain_no_logs(job))
    for log in logs:
        _check_readable(log.path)
    for line in merge_lines(wanted.choose(log.read(final=True)) for log in logs):
        say(wanted.render(line))


def follow_job(job: ForeignJob, say: Say, wanted: LineFilter) -> int:
    """Print new lines until the job ends; return 0 if it completed, else 1."""
    logs: dict[tuple[str, bool], Log] = {}
    state, looked = "", -math.inf
    while True:
        if time.monotonic() - looked > LOOK_S:
            try:
                job = ask_again(job) or job
            except UncertainError as error:
                say(f"-- {error}")
            looked = time.monotonic()
            now = ", ".join(dict.fromkeys(part.info.native_word for part in job.parts))
            if now != state:
                state = now
                say(f"-- job {job.word} is {state}")
        is_over = job.is_over
        for log in find_job_logs(job, wanted):
            logs.setdefault((str(log.path), log.is_err), log)
        for line in merge_lines(wanted.choose(log.read(final=is_over)) for log in logs.values()):
            say(wanted.render(line))
        if is_over:
            if not logs:
                say(explain_no_logs(job))
            return 0 if all(x.info.state is JobState.COMPLETED for x in job.parts) else 1
        time.sleep(POLL_S)


def _check_readable(path: Path) -> None:
    """Raise InputError if an existing file cannot be read, since it would otherwise look empty."""
    try:
        with open_file(path):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None

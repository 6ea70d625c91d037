"""Collect the stacks of a Slurm job that vjob did not submit, by py-spy on each of its nodes.

Such a job has no agent, so vjob's agent is sent as text on the standard input of a step beside the
job's own, and finds the job's processes by the variables that Slurm sets. Nothing is left behind.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from varuna_core.agent.bundle import write_bundle
from varuna_core.records.files import read_bytes
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.stacks.collect import PICK_PYTHON, Answers, StackQuery
from vjob.jobs.monitor.stacks.group import Stacks
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.foreign_job import ForeignJob, JobPart

LOADER = """
import base64, sys, tempfile
bundle = tempfile.NamedTemporaryFile(suffix=".pyz")
bundle.write(base64.b64decode(sys.stdin.read()))
bundle.flush()
sys.path.insert(0, bundle.name)
from varuna_core.agent.stacks import dump_job
jobs, hosts, native = sys.argv[1:4]
dump_job(jobs.split(","), hosts.split(","), native=native == "native", spies=sys.argv[4:])
"""


def collect_job_stacks(
    job: ForeignJob,
    *,
    native: bool = False,
    whole: bool = False,
    timeout_s: float = 60.0,
    tell: Callable[[int, int], None] = lambda done, all_: None,
) -> Stacks:
    """Collect the stacks of the job's Python processes, each with its rank if it has one."""
    running = [part for part in job.parts if part.is_running]
    if not running:
        states = ", ".join(dict.fromkeys(part.info.native_word for part in job.parts))
        raise InputError(f"job {job.word} is not running: {states}; only a running job has stacks")
    if not all(part.is_ours for part in running):
        owner = running[0].user or "another user"
        raise InputError(f"job {job.word} belongs to user {owner}: only that user may inspect it")
    hosts = [name for part in running for name in part.info.nodes]
    with tempfile.TemporaryDirectory(prefix="vjob-") as folder:
        bundle = Path(folder) / "agent.pyz"
        write_bundle(bundle, compiled=False)
        text = base64.b64encode(read_bytes(bundle)).decode()
    ids = sorted({number for part in job.parts for number in (part.raw_id, part.info.leader)})
    spy = str(Path(sys.executable).with_name("py-spy"))
    words = [sys.executable, "-c", LOADER, ",".join(ids), ",".join(hosts)]
    words += ["native" if native else "plain", spy]
    scheduler = schedulers.get_scheduler(job.scheduler)
    command = ["sh", "-c", PICK_PYTHON, "sh", *words]
    commands = [_build_command(scheduler.build_beside, part, command) for part in running]
    queries = [StackQuery(command=words, script=text) for words in commands]
    answers = Answers(queries, dict(enumerate(hosts)), tell, scheduler)
    answers.ask(timeout_s)
    world = len(answers.seen) + len(answers.failed)
    return answers.build_stacks(job.word, world, whole=whole)


def _build_command(build: Callable[..., list[str]], part: JobPart, command: list[str]) -> list[str]:
    """Build the step for one part of the job; each task receives the whole standard input."""
    is_component = "+" in part.info.id
    number = len(part.info.nodes)
    component = part.info.component if is_component else None
    leader = part.info.leader if is_component else part.raw_id
    words = build(leader, [(component, number)], "", command)
    return [word for word in words if word != "--input=/dev/null"]

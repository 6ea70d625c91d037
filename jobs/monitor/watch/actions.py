"""What a watch may do to a job, where it was asked to: never anything by itself.

cancel    as `vjob cancel`: asks the ranks to checkpoint first, where they can
requeue   scontrol requeue: the same job starts anew, from its last checkpoint
exclude   says how to submit without the nodes that were at fault; changes no job
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from varuna_core.records.events import read_events
from varuna_core.records.record import RunRecord
from varuna_core.records.runfolder import RunFolder
from vjob.jobs import process
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.monitor.model.verdict import Health
from vjob.jobs.monitor.watch.watch import Notice
from vjob.jobs.runs.cancel import cancel_run
from vjob.jobs.schedulers import slurm_commands as slurm

CANCEL, REQUEUE, EXCLUDE = "cancel", "requeue", "exclude"
ALLOWED = {
    Health.SLOW.value: (CANCEL, REQUEUE, EXCLUDE),
    Health.STALLED.value: (CANCEL, REQUEUE, EXCLUDE),
    Health.FAILING.value: (CANCEL, REQUEUE, EXCLUDE),
    Health.DEAD.value: (EXCLUDE,),
}
"""UNKNOWN is no reason for anything; what is dead can be submitted again, not requeued."""
CANCEL_WAIT_S = 60


@dataclass(frozen=True, kw_only=True)
class Action:
    """Do this once such news have held."""

    news: str
    verb: str


def parse_action(text: str) -> Action:
    """`STALLED=cancel`."""
    news, _, verb = text.partition("=")
    news, verb = news.strip().upper(), verb.strip().lower()
    if verb not in ALLOWED.get(news, ()):
        allowed = "; ".join(f"{name}={'|'.join(verbs)}" for name, verbs in ALLOWED.items())
        raise InputError(f"--on {text}: allowed are {allowed}")
    return Action(news=news, verb=verb)


def check_actions(actions: list[Action], record: RunRecord) -> None:
    """Refuse before the watch begins what could not be done when it matters."""
    if not any(action.verb == REQUEUE for action in actions):
        return
    if record.scheduler != "slurm":
        raise InputError(f"requeue is Slurm's, and {record.run} runs by {record.scheduler}")
    if record.layout == "split":
        raise InputError(f"{record.run} is split: its jobs would be requeued one by one")


def act(
    action: Action, notice: Notice, run: RunFolder, record: RunRecord, say: Callable[[str], None]
) -> str:
    """What was done, in words; VjobError where it could not be."""
    if action.verb == CANCEL:
        return cancel_run(run, now=False, wait_s=CANCEL_WAIT_S, say=say)
    if action.verb == REQUEUE:
        job = record.jobs[0].id
        command = slurm.build_requeue_command(job)
        result = process.run(command, env=process.tool_environment(os.environ))
        if result.code != 0:
            said = (result.err or result.out).strip()
            raise VjobError(f"job {job} was not requeued (cluster.requeue: true allows it): {said}")
        return f"job {job} is requeued"
    return _exclude(notice, run, record)


def _exclude(notice: Notice, run: RunFolder, record: RunRecord) -> str:
    node = notice.verdict.node
    if not node:
        return "no node is named by the verdict: none is excluded"
    before = [
        str(event["node"])
        for event in read_events(run)
        if event.get("kind") == "action" and event.get("verb") == EXCLUDE and event.get("node")
    ]
    nodes = sorted({*_read_excluded(run), *before, node})
    words = ["vjob", "submit", record.conf, "--set", f"cluster.exclude=[{', '.join(nodes)}]"]
    return f"{node} is to be avoided: {shlex.join(words)}"


def _read_excluded(run: RunFolder) -> list[str]:
    """What the run avoided already."""
    try:
        conf = yaml.safe_load(Path(run.resolved).read_text(encoding="utf-8"))
        return [str(node) for node in conf["cluster"]["exclude"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return []

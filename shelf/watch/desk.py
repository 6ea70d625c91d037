"""Side effects of `vjob watch`: print, write events, notify, and take the actions asked for.

cancel    as `vjob cancel`: asks the ranks to checkpoint first, if they can
requeue   starts the same job again, from its last checkpoint
exclude   prints how to submit without the nodes at fault; changes no job
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click

from varuna_core.records.logs.tail import clean, clean_name
from varuna_core.records.record import RunRecord, append_event, read_events, read_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.monitor.model.snapshot import Health, Snapshot, Verdict
from vjob.jobs.monitor.readers.job_reader import JudgedReader, open_reader
from vjob.jobs.runs.cancel import cancel_run
from vjob.jobs.runs.owner import expect_ours, is_ours
from vjob.jobs.runs.resolved import read_resolved
from vjob.jobs.schedulers import choose as schedulers
from vjob.shelf.watch.notify import Channels, choose_channels, read_webhook, send
from vjob.shelf.watch.watch import FINE, Look, Notice, watch_job

Say = Callable[..., None]
"""Function that prints a text; with `err`, on standard error."""
CANCEL, REQUEUE, EXCLUDE = "cancel", "requeue", "exclude"
ALLOWED = {
    Health.SLOW.value: (CANCEL, REQUEUE, EXCLUDE),
    Health.STALLED.value: (CANCEL, REQUEUE, EXCLUDE),
    Health.FAILING.value: (CANCEL, REQUEUE, EXCLUDE),
    Health.DEAD.value: (EXCLUDE,),
}
"""Actions by verdict: none for UNKNOWN, and no requeue for what is dead."""
CANCEL_WAIT_S = 60


@dataclass(frozen=True, kw_only=True)
class WatchAction:
    """An action, `verb`, to take once the news `news` has held for two polls."""

    news: str
    verb: str


def parse_action(text: str) -> WatchAction:
    """Parse an action such as `STALLED=cancel`."""
    news, _, verb = text.partition("=")
    news, verb = news.strip().upper(), verb.strip().lower()
    if verb not in ALLOWED.get(news, ()):
        allowed = "; ".join(f"{name}={'|'.join(verbs)}" for name, verbs in ALLOWED.items())
        raise InputError(f"--on {text}: allowed are {allowed}")
    return WatchAction(news=news, verb=verb)


def check_actions(actions: list[WatchAction], record: RunRecord) -> None:
    """Refuse, before the watch begins, actions that would not be possible."""
    if not any(action.verb == REQUEUE for action in actions):
        return
    scheduler = schedulers.get_scheduler(record.scheduler)
    if not scheduler.can.requeues:
        raise InputError(f"requeue: {record.run} runs with {scheduler.title}, which cannot requeue")
    if record.layout == "split":
        raise InputError(f"{record.run} is split: its jobs would be requeued one by one")


def act(
    action: WatchAction,
    notice: Notice,
    run: RunFolder,
    record: RunRecord,
    say: Callable[[str], None],
) -> str:
    """Carry out an action; return what was done, in words."""
    if action.verb == CANCEL:
        saves_nan = notice.verdict.rule == "not a number"
        return cancel_run(run, now=saves_nan, wait_s=CANCEL_WAIT_S, say=say)
    if action.verb == REQUEUE:
        job = record.jobs[0].id
        schedulers.get_scheduler(record.scheduler, run).requeue(job)
        return f"job {job} is requeued"
    return _exclude(notice, run, record)


def _exclude(notice: Notice, run: RunFolder, record: RunRecord) -> str:
    node = notice.verdict.node
    if not node:
        return "the verdict names no node: none is excluded"
    before = [
        str(event["node"])
        for event in read_events(run)
        if event.get("kind") == "action" and event.get("verb") == EXCLUDE and event.get("node")
    ]
    nodes = sorted({*_read_excluded(run), *before, node})
    words = ["vjob", "submit", record.conf, "--set", f"cluster.exclude=[{', '.join(nodes)}]"]
    return f"{node} should be avoided: {shlex.join(words)}"


def _read_excluded(run: RunFolder) -> list[str]:
    """Return the nodes that the run's conf already excludes."""
    try:
        return [str(node) for node in read_resolved(run)["cluster"]["exclude"]]
    except (KeyError, TypeError):
        return []


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    every_s: float
    for_min: float | None = None
    mail: str | None = None
    webhook_file: Path | None = None
    command: str | None = None
    quiet: bool = False
    on: tuple[str, ...] = ()
    as_json: bool = False


def run_watch(job: str, here: Path, options: WatchOptions, say: Say = click.echo) -> int:
    """Watch until the job ends or the time is up; return the exit code. `say` prints a text."""
    actions = [parse_action(text) for text in options.on]
    given = Channels(
        mail=options.mail, webhook=read_webhook(options.webhook_file), command=options.command
    )
    look = open_look(job, here)
    run = find_own_run(look()[0])
    record = None if run is None else read_record(run)
    if run is None or record is None:
        if actions:
            raise InputError(f"{job} is a folder of logs, not a run of vjob: no action is possible")
        channels = given
    else:
        if actions:
            expect_ours(run, "vjob acts only on your own runs")
        check_actions(actions, record)
        channels = choose_channels(run, Path(record.conf), given) if not options.quiet else given
    for_min = options.for_min
    end = None if for_min is None else time.monotonic() + 60 * for_min
    desk = Desk(
        run, record, Channels() if options.quiet else channels, actions, end, options.as_json, say
    )
    desk.listen()
    if desk.channels.names:
        say(f"notices go to: {', '.join(desk.channels.names)}", err=True)
    return watch_job(look, desk, every_s=options.every_s, last_news=read_last_news(run))


def open_look(job: str, here: Path) -> Look:
    return JudgedReader(open_reader(job, here)).read


def find_own_run(snapshot: Snapshot) -> RunFolder | None:
    """Return the run's folder; None for a bare folder of logs."""
    run = RunFolder(Path(snapshot.folder))
    return run if run.record.is_file() else None


def read_last_news(run: RunFolder | None) -> str:
    """Return the last news that any channel delivered, from the run's events; FINE without one."""
    last_news = FINE
    for event in [] if run is None else read_events(run):
        if event.get("kind") == "notice" and (
            not event.get("to") or event["to"] != event.get("failed")
        ):
            last_news = str(event.get("news", FINE))
    return last_news


class Desk:
    """Surroundings of a watch: terminal, events of the run, channels, actions."""

    def __init__(
        self,
        run: RunFolder | None,
        record: RunRecord | None,
        channels: Channels,
        actions: list[WatchAction],
        end: float | None,
        as_json: bool,
        say: Say = click.echo,
    ) -> None:
        self.channels = channels
        self._echo = say
        self._run, self._record, self._actions = run, record, actions
        self._end, self._as_json = end, as_json
        self._left = threading.Event()

    def listen(self) -> None:
        """Leave on a signal, except on ignored ones, as under nohup."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.leave)

    def leave(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: leave after the present work, or at once on a second one."""
        self._left.set()
        signal.signal(number, signal.SIG_DFL)

    def wait(self, seconds: float) -> bool:
        if self._end is not None:
            left = self._end - time.monotonic()
            if left <= 0:
                return False
            seconds = min(seconds, left)
        return not self._left.wait(seconds)

    def tell(self, verdict: Verdict, snapshot: Snapshot) -> None:
        facts: dict[str, Any] = {"health": verdict.health.value, "rule": verdict.rule}
        facts["reason"] = verdict.reason
        facts |= {"node": verdict.node} if verdict.node else {}
        facts |= {} if verdict.rank is None else {"rank": verdict.rank}
        self._note("verdict", **facts)
        clock = time.strftime("%H:%M:%S", time.localtime(snapshot.now))
        event = {"kind": "verdict", "time": snapshot.now, "run": snapshot.run, **verdict.as_json()}
        text = f"{clock}  {verdict.health.value:<13} {clean_name(verdict.reason)}"
        if verdict.advice and verdict.exit_code:
            text += f"\n{'':24}{clean_name(verdict.advice)}"
        self._print(text, event)

    def notify(self, notice: Notice) -> None:
        problems = send(notice, self.channels, lambda seconds: not self._left.wait(seconds))
        for name, problem in problems.items():
            self.complain(f"{name}: {problem}")
        # Not the problems themselves: what a user's command says of itself may hold secrets.
        self._note("notice", news=notice.news, to=self.channels.names, failed=[*problems])
        for action in self._actions:
            if action.news == notice.news:
                self._act(action, notice)

    def _act(self, action: WatchAction, notice: Notice) -> None:
        assert self._run is not None and self._record is not None
        facts: dict[str, Any] = {"verb": action.verb, "because": action.news}
        facts |= {"node": notice.verdict.node} if notice.verdict.node else {}
        try:
            done = act(action, notice, self._run, self._record, self._say)
        except VjobError as error:
            self._note("action", **facts, failed=str(error))
            self.complain(f"--on {action.news}={action.verb}: {error}")
            return
        self._note("action", **facts, done=done)
        self._print(f"{'':10}{action.verb}: {done}", {"kind": "action", **facts, "done": done})

    def complain(self, text: str) -> None:
        self._echo(f"vjob: {clean(text)}", err=True)

    def _say(self, text: str) -> None:
        self._echo(clean(text), err=True)

    def _print(self, text: str, value: dict[str, Any]) -> None:
        line = json.dumps({"format": 1, **value})
        click.echo(line) if self._as_json else self._echo(clean(text))
        sys.stdout.flush()

    def _note(self, kind: str, **facts: Any) -> None:
        """Record an event of the run; a full disk or another user's run does not end the watch."""
        if self._run is None or not is_ours(self._run):
            return
        try:
            append_event(self._run.vjob_events, kind, **facts)
        except OSError as error:
            self.complain(f"{self._run.vjob_events} cannot be written: {error.strerror}")

"""What `vjob watch` does to the world: it prints, notes, notifies and acts."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click

from varuna_core.records.events import append_event, read_events
from varuna_core.records.record import RunRecord, read_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.monitor.model.snapshot import Snapshot
from vjob.jobs.monitor.model.verdict import Verdict
from vjob.jobs.monitor.readers.judged import JudgedReader
from vjob.jobs.monitor.readers.open import open_reader
from vjob.jobs.monitor.watch.actions import Action, act, check_actions, parse_action
from vjob.jobs.monitor.watch.notify import Channels, find_channels, read_webhook, send
from vjob.jobs.monitor.watch.watch import FINE, Look, Notice, watch_job


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user asked for."""

    every_s: float
    for_min: float | None = None
    mail: str | None = None
    webhook_file: Path | None = None
    command: str | None = None
    quiet: bool = False
    on: tuple[str, ...] = ()
    as_json: bool = False


def run_watch(job: str, here: Path, wishes: Wishes) -> int:
    """To the job's end, or as long as wished; the exit code."""
    actions = [parse_action(text) for text in wishes.on]
    given = Channels(
        mail=wishes.mail, webhook=read_webhook(wishes.webhook_file), command=wishes.command
    )
    look = open_look(job, here)
    run = find_own_run(look()[0])
    record = None if run is None else read_record(run)
    if run is None or record is None:
        if actions:
            raise InputError(
                f"{job} is a folder of logs, no run of vjob: nothing can be done to it"
            )
        channels = given
    else:
        check_actions(actions, record)
        channels = find_channels(run, Path(record.conf), given) if not wishes.quiet else given
    end = None if wishes.for_min is None else time.monotonic() + 60 * wishes.for_min
    desk = Desk(run, record, Channels() if wishes.quiet else channels, actions, end, wishes.as_json)
    desk.listen()
    if desk.channels.names:
        click.echo(f"notices go to: {', '.join(desk.channels.names)}", err=True)
    return watch_job(look, desk, every_s=wishes.every_s, told=read_told(run))


def open_look(job: str, here: Path) -> Look:
    return JudgedReader(open_reader(job, here)).read


def find_own_run(snapshot: Snapshot) -> RunFolder | None:
    """The run's folder; None for a bare folder of logs."""
    run = RunFolder(Path(snapshot.folder))
    return run if run.record.is_file() else None


def read_told(run: RunFolder | None) -> str:
    """What the last notice said that reached anybody, maybe of a watch before this one."""
    told = FINE
    for event in [] if run is None else read_events(run):
        if event.get("kind") == "notice" and (
            not event.get("to") or event["to"] != event.get("failed")
        ):
            told = str(event.get("news", FINE))
    return told


class Desk:
    """Where a watch prints, notes and acts."""

    def __init__(
        self,
        run: RunFolder | None,
        record: RunRecord | None,
        channels: Channels,
        actions: list[Action],
        end: float | None,
        as_json: bool,
    ) -> None:
        self.channels = channels
        self._run, self._record, self._actions = run, record, actions
        self._end, self._as_json = end, as_json
        self._left = threading.Event()

    def listen(self) -> None:
        """Leave on a signal; one that is ignored, as nohup has it, stays so."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.leave)

    def leave(self, number: int, frame: FrameType | None) -> None:
        """On a signal: after what is being done; on a second one at once."""
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
        told = {"kind": "verdict", "time": snapshot.now, "run": snapshot.run, **verdict.as_json()}
        text = f"{clock}  {verdict.health.value:<13} {verdict.reason}"
        if verdict.advice and verdict.exit_code:
            text += f"\n{'':25}{verdict.advice}"
        self._print(text, told)

    def notify(self, notice: Notice) -> None:
        problems = send(notice, self.channels, lambda seconds: not self._left.wait(seconds))
        for name, problem in problems.items():
            self.complain(f"{name}: {problem}")
        # Not the problems themselves: what a user's command says of itself may hold secrets.
        self._note("notice", news=notice.news, to=self.channels.names, failed=[*problems])
        for action in self._actions:
            if action.news == notice.news:
                self._act(action, notice)

    def _act(self, action: Action, notice: Notice) -> None:
        assert self._run is not None and self._record is not None
        told: dict[str, Any] = {"verb": action.verb, "because": action.news}
        told |= {"node": notice.verdict.node} if notice.verdict.node else {}
        try:
            done = act(action, notice, self._run, self._record, self._say)
        except VjobError as error:
            self._note("action", **told, failed=str(error))
            self.complain(f"--on {action.news}={action.verb}: {error}")
            return
        self._note("action", **told, done=done)
        self._print(f"{'':10}{action.verb}: {done}", {"kind": "action", **told, "done": done})

    def complain(self, text: str) -> None:
        click.echo(f"vjob: {text}", err=True)

    def _say(self, text: str) -> None:
        click.echo(text, err=True)

    def _print(self, text: str, value: dict[str, Any]) -> None:
        click.echo(json.dumps(value) if self._as_json else text)
        sys.stdout.flush()

    def _note(self, kind: str, **facts: Any) -> None:
        """In the run's events; a full disk, or a colleague's run, does not end a watch."""
        if self._run is None:
            return
        try:
            append_event(self._run.vjob_events, kind, **facts)
        except OSError as error:
            self.complain(f"{self._run.vjob_events} cannot be written: {error.strerror}")

"""Main loop of `vjob watch`, which polls a job and decides what is news.

    poll ─► verdict ─┬─ another one than before ─► a line, an event
                     └─ the same news twice ─────► a notice, and the actions set for such news

A verdict that changes back and forth makes lines and events but no notices: news must hold for two
polls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.model.snapshot import ENDED, Health, Snapshot, Verdict

Look = Callable[[], tuple[Snapshot, Verdict]]

HOLD = 2
"""Number of successive polls for which news must hold."""
LAST_S = 5.0
"""Seconds until the second poll of a job that seems to be over."""
FINE = "fine"
REQUEUED = "requeued"


def news_of(verdict: Verdict) -> str:
    """Return what a verdict reports: FINE, or the name of the problem."""
    if verdict.health in ENDED:
        return verdict.health.value
    if verdict.exit_code:
        return "NEVER STARTS" if verdict.never_starts else verdict.health.value
    return REQUEUED if verdict.health is Health.REQUEUED else FINE


class Damper:
    """Filters news: passes those that held and differ from the last ones sent."""

    def __init__(self, last_news: str = FINE) -> None:
        """`last_news` is the content of the last notice, also of an earlier watch."""
        self.last_news = last_news
        self._now = ""
        self._held = 0

    def filter(self, news: str) -> str | None:
        """Return the news if it must be sent now, else None; FINE is sent only after a problem."""
        self._held = self._held + 1 if news == self._now else 1
        self._now = news
        if self._held < HOLD or news == self.last_news:
            return None
        before, self.last_news = self.last_news, news
        return None if news == FINE and before == REQUEUED else news


@dataclass(frozen=True, kw_only=True)
class Notice:
    """News of a job to send."""

    news: str
    snapshot: Snapshot
    verdict: Verdict

    @property
    def headline(self) -> str:
        what = "is well again" if self.news == FINE else f"is {self.verdict.health.value}"
        return f"{self.snapshot.run} {what}: {self.verdict.reason}"

    def as_json(self) -> dict[str, Any]:
        """Return the notice for webhooks and commands; chat services show `text`."""
        snapshot, verdict = self.snapshot, self.verdict
        evidence = [f"{line.node or line.file}: {line.text}" for line in verdict.evidence[:3]]
        lines = [self.headline, *evidence, *verdict.facts[:3], verdict.advice]
        return {
            "format": 1,
            "news": "recovered" if self.news == FINE else self.news,
            "run": snapshot.run,
            "folder": snapshot.folder,
            "jobs": [job.id for job in snapshot.scheduler.jobs],
            "time": snapshot.now,
            "step": snapshot.progress.step if snapshot.progress else None,
            "verdict": verdict.as_json(),
            "text": "\n".join(filter(None, lines)),
        }


class WatchEffects(Protocol):
    def tell(self, verdict: Verdict, snapshot: Snapshot) -> None:
        """Report a changed verdict on the terminal and in the run's events."""

    def notify(self, notice: Notice) -> None:
        """Send a notice, and take the actions asked for on such news."""

    def complain(self, text: str) -> None:
        """Report that something failed; the watch continues."""

    def wait(self, seconds: float) -> bool:
        """Wait; return False if the watch must end."""


def watch_job(look: Look, around: WatchEffects, *, every_s: float, last_news: str = FINE) -> int:
    """Poll until the job is over or `around` ends it; returns the last verdict's exit code."""
    damper = Damper(last_news)
    last: tuple[Any, ...] | None = None
    verdict: Verdict | None = None
    complaint = ""
    while True:
        try:
            snapshot, verdict = look()
            complaint = ""
        except (VjobError, OSError) as error:
            if str(error) != complaint:
                complaint = str(error)
                around.complain(complaint)
            if not around.wait(every_s):
                break
            continue
        mark = (verdict.health, verdict.rule, verdict.phase, verdict.node, verdict.rank)
        if mark != last:
            last = mark
            around.tell(verdict, snapshot)
        news = damper.filter(news_of(verdict))
        if news is not None:
            around.notify(Notice(news=news, snapshot=snapshot, verdict=verdict))
        is_over = verdict.health in ENDED
        if is_over and damper.last_news == news_of(verdict):
            break
        if not around.wait(min(every_s, LAST_S) if is_over else every_s):
            break
    return EXIT_NOTHING if verdict is None else verdict.exit_code


EXIT_NOTHING = 11
"""Exit code if no poll gave a verdict, so nothing is known."""

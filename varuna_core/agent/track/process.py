"""Manage the tracker's process for the agent: start it, report if it was killed, and end it in
time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import replace
from typing import Callable, Dict, Iterator, Optional

from varuna_core.agent.processes.proc import ContainerProcesses
from varuna_core.agent.processes.process import RankProcess, start_rank
from varuna_core.agent.setup.container import fill_in
from varuna_core.agent.setup.ranks import Meeting, RankStart, build_rank
from varuna_core.agent.setup.site import Site
from varuna_core.records.files import PRIVATE_FILE
from varuna_core.records.record import append_event

END_S = 32.0
"""Most seconds for the tracker to end after the ranks; it usually takes less."""
SHORT_END_S = 5.0
"""Seconds for the tracker to end before a morph, or if the scheduler is about to kill the job;
points that were not sent are sent in the next attempt."""
POLL_S = 0.05
OURS = {"OMP_NUM_THREADS": "1"}
_ACCESS = re.compile(
    r"WANDB_|MLFLOW_|DATABRICKS_|NETRC$|(REQUESTS_CA_BUNDLE|SSL_CERT_FILE|SSL_CERT_DIR)$"
    r"|(https?|no|all)_proxy$",
    re.IGNORECASE,
)
"""Variables by which tracking tools reach their servers. Some are secret: they are passed from the
agent's own environment to the tracker, and to no other process."""


def build_start(site: Site, meeting: Meeting) -> Optional[RankStart]:
    """Build the command and environment of the tracker; None if this node has nothing to track."""
    track = site.plan.track
    if track is None or site.node.index != 0:
        return None
    # No rank's number: it is not to be taken for one.
    local_rank = -1 - site.node.first_rank
    agent = str(site.run.agent)
    words = (track.python, agent, "track", "--run", str(site.run.path))
    plan = replace(
        site.plan,
        command=(*words, "--attempt", str(site.attempt.number)),
        prefix=(),
        prefixed=None,
    )
    access = {name: value for name, value in site.env.items() if _ACCESS.match(name)}
    group = site.node.group
    env = {**access, **plan.env, **group.env, **OURS, meeting.visible_variable: ""}
    node = replace(site.node, group=replace(group, env=env))
    start = build_rank(plan, node, local_rank, meeting, site.env, site.container)
    return replace(start, argv=fill_in(start.argv, site, -1))


class TrackerProcess:
    """The tracker of one attempt; nothing that it does or fails to do ends the attempt."""

    def __init__(self, site: Site, complain: Callable[[str], None]) -> None:
        self._site, self._complain = site, complain
        self._process: Optional[RankProcess] = None

    def start(self, meeting: Meeting) -> None:
        """Start the tracker. Call this from the main thread: the tracker ends with that thread."""
        try:
            start = build_start(self._site, meeting)
            if start is None:
                return
            inside = ContainerProcesses(start.marks) if start.marks else None
            with _open_log(self._site) as log:
                self._process = start_rank(start.argv, start.env, start.cwd, inside, log=log)
        except OSError as error:
            self._say(f"the tracker could not be started: {error.strerror}")

    def poll(self) -> None:
        """Report if the tracker has ended while ranks run."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            self._process = None
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited {code}"
            self._say(f"the tracker {how}; training continues without it")

    def end(self, *, left_s: float = END_S) -> None:
        """After the ranks' end, wait `left_s` for the tracker, but not less than SHORT_END_S or
        more than END_S; then kill it."""
        if self._process is None:
            return
        deadline = time.monotonic() + min(max(left_s, SHORT_END_S), END_S)
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if self._process.poll() is None:
            self._process.signal_group(signal.SIGKILL)
            self._process.poll()

    def _say(self, text: str) -> None:
        self._complain(text)
        with contextlib.suppress(OSError):
            facts: Dict[str, object] = {"attempt": self._site.attempt.number, "said": text}
            append_event(self._site.run.events(), "tracking", **facts)


@contextlib.contextmanager
def _open_log(site: Site) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(site.attempt.track_log, flags, PRIVATE_FILE)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)

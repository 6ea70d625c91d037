"""The single container of a node's ranks: started before any rank, entered by each, ended after the
last.

If each rank started a container of its own, the ranks would wait for each other's hooks and locks,
and would not share a /tmp.

    prepare ─► hold ─► says HOLDS, reads its input to the end ···························► ended
                          rank 0: START %{holder} PROGRAM ─► its own pid, pipes and end
                          rank 1: START %{holder} PROGRAM ─► ...

The holder is a child of the agent and dies with it. Ranks do not need it once they are inside.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from typing import Iterator, Mapping, NamedTuple, Optional

from varuna_core.agent.processes.process import RankProcess, start_rank
from varuna_core.agent.setup.container import fail_check, fill_in, read_last_words
from varuna_core.agent.setup.site import Site
from varuna_core.records.nodes import OK, Check
from varuna_core.records.plan import ContainerPlan

HOLDS = b"vjob-holds"
"""Line that the holder prints once the container is up; hooks may print other lines before it."""
HOLD_S = 600.0
"""Most seconds for the container to start: for the hooks of the site, and for those of other jobs
that start on the same unpacked image."""
KEPT_BYTES = 65_536
_POLL_S = 0.2


class _ContainerStart(NamedTuple):
    """Result of starting the container: its process, or else the reason for the failure."""

    process: Optional[RankProcess]
    said: str


@contextlib.contextmanager
def hold_container(site: Site, container: ContainerPlan, env: Mapping[str, str]) -> Iterator[Check]:
    """Start the node's container by `container.hold` and yield the check of its start; while the
    container runs, its pid is in the site's facts. End the container on leaving."""
    begun = time.monotonic()
    deadline = begun + min(site.plan.timing.prepare_s, HOLD_S)
    held = _start(site, container, env, deadline)
    while held.process is None and _is_worth_another(site, container, held.said, deadline):
        held = _start(site, container, env, deadline)
    if held.process is None:
        text = f"{container.runtime}: {held.said}"
        yield fail_check(site, text)
        return
    site.facts.holder = held.process.pid
    try:
        yield Check(
            "container", OK, f"{container.runtime} started in {time.monotonic() - begun:.1f} s"
        )
    finally:
        site.facts.holder = None
        _end(held.process)


def _is_worth_another(site: Site, container: ContainerPlan, said: str, deadline: float) -> bool:
    is_busy = bool(container.hold_again) and re.search(container.hold_again, said) is not None
    return is_busy and time.monotonic() < deadline and not site.stopping()


def _start(
    site: Site, container: ContainerPlan, env: Mapping[str, str], deadline: float
) -> _ContainerStart:
    try:
        process = start_rank(fill_in(container.hold, site), env, "/", waits=True)
    except OSError as error:
        return _ContainerStart(None, f"could not start: {error.strerror}")
    said = {process.stdout: b"", process.stderr: b""}
    waiting = list(said)
    while waiting:
        for pipe in select.select(waiting, [], [], _POLL_S)[0]:
            data = os.read(pipe, KEPT_BYTES)
            said[pipe] = (said[pipe] + data)[-KEPT_BYTES:]
            if not data:
                waiting.remove(pipe)
        if HOLDS in said[process.stdout].splitlines():
            return _ContainerStart(process, "")
        if time.monotonic() >= deadline or site.stopping():
            break
        process.poll()  # what it left in its group, and with it the pipes, end with it
    _end(process)
    data = said[process.stderr] or said[process.stdout]
    words = read_last_words(data.decode("utf-8", "replace")) or "without a word"
    return _ContainerStart(None, f"took too long and was ended: {words}" if waiting else words)


def _end(process: RankProcess) -> None:
    process.signal_group(signal.SIGKILL)
    process.close()

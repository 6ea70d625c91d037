"""`vjob status`: reads words, opens a reader, prints, exits."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vjob.jobs.commands.arguments import complete_job, json_option

if TYPE_CHECKING:
    from vjob.jobs.monitor.model.snapshot import Snapshot, Verdict
    from vjob.jobs.monitor.readers.job_reader import Reader
    from vjob.jobs.runs.find import RunView

INTERVAL_S = 2.0


@click.command()
@click.argument("job", required=False, shell_complete=complete_job)
@click.option("--once", is_flag=True, help="Print it plain once, on a terminal too.")
@click.option("--interval", "interval_s", type=click.FloatRange(min=0.2), default=INTERVAL_S,
              show_default=True, metavar="SECONDS",
              help="How often the live screen looks.")  # fmt: skip
@click.option("--watch", "every_s", type=click.FloatRange(min=0.2), metavar="SECONDS",
              help="Print it again and again until the job has ended.")  # fmt: skip
@click.option(
    "--lines", "-n", default=2, show_default=True, help="Last lines of each node's files."
)
@click.option("--all", "-a", "show_all", is_flag=True, help="Every node, or run, however many.")
@json_option
def status(
    job: str | None,
    once: bool,
    interval_s: float,
    every_s: float | None,
    lines: int,
    show_all: bool,
    as_json: bool,
) -> None:
    """Show how JOB goes, or how all your runs go: a job id, a name, or a folder of logs.

    \b
    vjob status last
    vjob status 4711 --json | jq .progress.step
    vjob status log2/10932251

    Exits 0 while all is well and when it is done, 10 when it failed, 11 when nothing is known,
    12 when it pends for a reason that does not pass by itself; docs/status.md has the rest.
    """
    if job is None:
        _print_table(show_all, as_json)
        return
    from vjob.jobs.monitor.screen.start import can_show, show

    if not (once or as_json or every_s) and can_show(os.environ):
        sys.exit(show(job, Path.cwd(), interval_s))
    from vjob.jobs.monitor.readers.job_reader import JudgedReader, open_reader

    if every_s is None:
        gc.disable()  # one look makes many objects and drops few: a third of its time else
    reader = open_reader(job, Path.cwd(), num_lines=lines)
    judged = JudgedReader(reader)
    while True:
        snapshot, verdict = judged.read()
        _print(reader, snapshot, verdict, show_all=show_all, as_json=as_json)
        if every_s is None or once or _is_over(snapshot):
            sys.exit(verdict.exit_code)
        time.sleep(every_s)
        if not as_json:
            click.clear() if sys.stdout.isatty() else click.echo()


def _print(
    reader: Reader, snapshot: Snapshot, verdict: Verdict, *, show_all: bool, as_json: bool
) -> None:
    from vjob.jobs.monitor.model.text import choose_nodes, render, render_json

    if as_json:
        click.echo(render_json(snapshot, verdict))
        return
    shown = snapshot.nodes if show_all else choose_nodes(snapshot, verdict)
    counts = reader.count_lines([node.name for node in shown])
    nodes = tuple(
        replace(node, num_lines=counts[node.name]) if node.name in counts else node
        for node in snapshot.nodes
    )
    click.echo(render(replace(snapshot, nodes=nodes), verdict, all_nodes=show_all))


def _is_over(snapshot: Snapshot) -> bool:
    return snapshot.record_state in ("ended", "refused")


def _describe(view: RunView) -> dict[str, Any]:
    """A run's verdict and what it stands on, by its files and what the scheduler just said.

    What has ended is told by its record: nobody waits for the logs of twenty old runs.
    """
    from vjob.jobs.monitor.readers.run import RunReader
    from vjob.jobs.monitor.readers.scheduler import SchedulerDesk
    from vjob.jobs.monitor.rules.judge import judge

    desk = SchedulerDesk(view.run, view.record.scheduler, view=lambda run: view)
    is_live = view.record.state == "submitted"
    snapshot = RunReader(view.run, num_lines=0, desk=desk, reads_attempt=is_live).read()
    verdict = judge(snapshot)
    return {"state": verdict.health.value, "message": verdict.reason}


def _print_table(show_all: bool, as_json: bool) -> None:
    from vjob.jobs.runs import listing

    rows = listing.list_runs(None if show_all else 20, _describe)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    click.echo(json.dumps(rows) if as_json else listing.render(rows, width))

"""Commands that look at a job: `vjob status`, `logs`, `watch` and `stacks`."""

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

from vjob.jobs.commands.arguments import complete_job, job_argument, json_option

if TYPE_CHECKING:
    from vjob.jobs.monitor.model.snapshot import Snapshot, Verdict
    from vjob.jobs.monitor.readers.job_reader import Reader
    from vjob.jobs.runs.find import RunView

INTERVAL_S = 2.0
"""Between two refreshes of the live screen."""
WATCH_EVERY_S = 30.0
STACKS_WAIT_S = 60
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")


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
    """A run's verdict and its reason, from its files and the scheduler's last answer.

    A run that has ended is judged by its record: nobody waits for the logs of twenty old runs.
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


@click.command()
@job_argument
@click.option("--follow", "-f", is_flag=True, help="Go on until the run has ended.")
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="Only this node (repeatable).")
@click.option(
    "--rank", "ranks", multiple=True, type=int, metavar="N", help="Only this rank (repeatable)."
)
@click.option("--grep", "pattern", metavar="REGEX", help="Only lines that match.")
@click.option("--err", "only_err", is_flag=True, help="Only standard error.")
@click.option("--attempt", type=int, help="Which start of the ranks; default: the last.")
@click.option("--lines", "-n", type=int, help="Only the last N lines of each file.")
@click.option("--errors", is_flag=True, help="The first error, with what stands around it.")
@click.option("--raw", is_flag=True, help="File after file, and every rank's lines by themselves.")
def logs(
    job: str,
    follow: bool,
    nodes: tuple[str, ...],
    ranks: tuple[int, ...],
    pattern: str | None,
    only_err: bool,
    attempt: int | None,
    lines: int | None,
    errors: bool,
    raw: bool,
) -> None:
    """Print the lines of JOB's nodes, or of some ranks, in the order of time.

    A line of standard error begins with `n060 err |`, one that many ranks print alike with
    `x64 all ranks |`.

    \b
    vjob logs last --errors
    vjob logs last --rank 3 --grep loss
    vjob logs -f 4711 --node n060
    """
    from vjob.jobs.monitor.log_lines import print_logs as reading
    from vjob.jobs.runs.find import find_run

    run = find_run(job, Path.cwd())
    wanted = reading.LineFilter.make(
        nodes=nodes, ranks=ranks, pattern=pattern, only_err=only_err, raw=raw, paint=paint_rank
    )
    if errors:
        reading.print_errors(run, click.echo, wanted, attempt=attempt)
        return
    if follow:
        sys.exit(reading.follow_run(run, click.echo, wanted))
    reading.print_logs(run, click.echo, wanted, attempt=attempt, num_lines=lines)


def paint_rank(text: str, rank: int | None) -> str:
    """Colour a rank's text unlike its neighbours'; click.echo drops colours off a terminal."""
    if os.environ.get("NO_COLOR"):
        return text
    return click.style(text, bold=True) if rank is None else click.style(text, fg=COLOURS[rank % 7])


@click.command()
@job_argument
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=1),
    default=WATCH_EVERY_S,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@click.option(
    "--for", "for_min", type=click.FloatRange(min=0), metavar="MINUTES", help="Leave after so long."
)
@click.option("--mail", metavar="ADDRESS", help="Mail notices there; default: notify.mail.")
@click.option(
    "--webhook",
    "webhook_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="POST notices to the URL in FILE; default: VJOB_WEBHOOK, then notify.webhook.",
)
@click.option("--command", metavar="SHELL", help="Gets notices as JSON; default: notify.command.")
@click.option("--quiet", is_flag=True, help="Notify nobody, whatever the conf says.")
@click.option(
    "--on",
    "on",
    multiple=True,
    metavar="VERDICT=ACTION",
    help="Do this when it holds: cancel, requeue or exclude (repeatable). Default: nothing.",
)
@json_option
def watch(
    job: str,
    every_s: float,
    for_min: float | None,
    mail: str | None,
    webhook_file: Path | None,
    command: str | None,
    quiet: bool,
    on: tuple[str, ...],
    as_json: bool,
) -> None:
    """Look at JOB every so often, to its end; print each change, and notify who is away.

    \b
    vjob watch last                                   in tmux, with notify of the conf
    vjob watch 4711 --for 9 --every 60                from cron, every ten minutes
    vjob watch last --on STALLED=requeue --mail me@example.org

    A notice goes out when a verdict has held for two looks, and again when the job is well. The
    exit code is that of the last verdict, as `vjob status` has it.
    """
    from vjob.jobs.monitor.watch.desk import WatchOptions, run_watch

    options = WatchOptions(
        mail=mail,
        webhook_file=webhook_file,
        command=command,
        quiet=quiet,
        on=on,
        every_s=every_s,
        for_min=for_min,
        as_json=as_json,
    )
    sys.exit(run_watch(job, Path.cwd(), options))


@click.command()
@job_argument
@click.option("--full", is_flag=True, help="All threads, and the same stacks only if all agree.")
@click.option("--native", is_flag=True, help="Also frames of C, C++ and Cython.")
@click.option(
    "--wait",
    "wait_s",
    default=STACKS_WAIT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long nodes may take.",
)
@json_option
def stacks(job: str, full: bool, native: bool, wait_s: int, as_json: bool) -> None:
    """Show what the ranks of JOB are at, equal stacks together, the fewest first.

    In a hang, most ranks wait for the same; the few that are elsewhere are the ones to look at.
    py-spy looks at every rank for a moment; the job goes on. Exits 1 where no rank could be seen.

    \b
    vjob stacks last
    vjob stacks 4711 --full --native      all threads, and what runs below Python
    """
    from vjob.jobs.monitor.stacks.collect import collect_stacks
    from vjob.jobs.monitor.stacks.group import render_stacks
    from vjob.jobs.runs.find import find_run, view_run

    view = view_run(find_run(job, Path.cwd()))
    shows = sys.stderr.isatty()

    def tell(done: int, num_nodes: int) -> None:
        if shows:
            click.echo(f"\r{done} of {num_nodes} nodes have answered", err=True, nl=False)

    try:
        found = collect_stacks(view, native=native, whole=full, timeout_s=wait_s, tell=tell)
    finally:
        if shows:
            click.echo("\r\033[K", err=True, nl=False)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        click.echo(render_stacks(found, whole=full))
    sys.exit(0 if found.groups else 1)

"""Commands that inspect a job: `vjob status`, `logs`, `watch`, `stacks` and `shell`."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vjob.jobs.conf.quantities import MINUTES
from vjob.shelf.commands.arguments import (
    Duration,
    Moment,
    check_port,
    complete_by,
    complete_job,
    job_argument,
    json_option,
    port_option,
    print_list,
)
from vjob.shelf.commands.terminal import StatusLine, can_draw, has_colours, say

if TYPE_CHECKING:
    from vjob.jobs.monitor.model.snapshot import Snapshot, Verdict
    from vjob.jobs.monitor.readers.job_reader import Reader

INTERVAL_S = 2.0
"""Seconds between two refreshes of the live screen."""
WATCH_EVERY_S = 30.0
STACKS_WAIT_S = 60
NUM_RUNS = 20
"""Number of runs in the table without `--all`; the live list shows all runs."""
PLAIN_S = 5.0
"""Seconds to spend on the logs of ended runs for a table printed once: no refresh follows."""
COLOURS = (30, 28, 130, 133, 32, 98, 100)
"""Colours for ranks, of xterm's 256: chosen to be legible on both black and white."""
FEW_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "red")
"""Colours for ranks on a terminal with few colours, whose exact tones the terminal decides."""


@click.command()
@click.argument("job", required=False, shell_complete=complete_job)
@click.option("--once", is_flag=True, help="Print the status once as text, also on a terminal.")
@click.option("--interval", "interval_s", type=Duration(least=0.2), default=INTERVAL_S,
              show_default=True, metavar="SECONDS",
              help="Time between two refreshes of the live screen.")  # fmt: skip
@click.option("--watch", "every_s", type=Duration(least=0.2), metavar="SECONDS",
              help="Print the status repeatedly until the job has ended.")  # fmt: skip
@click.option(
    "--lines", "-n", default=2, show_default=True, help="Last lines of each node's files."
)
@click.option("--all", "-a", "show_all", is_flag=True, help="Show all nodes or runs.")
@click.option("--web", is_flag=True, help="Serve a live page for a browser until Ctrl-C.")
@port_option
@json_option
def status(
    job: str | None,
    once: bool,
    interval_s: float,
    every_s: float | None,
    lines: int,
    show_all: bool,
    web: bool,
    port: int | None,
    as_json: bool,
) -> None:
    """Show the status of JOB, or of all your runs.

    JOB is a job id, a name, or a folder of logs.

    \b
    vjob status last
    vjob status 4711 --json | jq .progress.step
    vjob status log2/10932251
    vjob status --web                  all runs in a browser

    Exits 0 while all is well and when it is done, 10 when it failed, 11 when nothing is known,
    12 when it can never start as submitted; docs/verdicts.md has the rest.
    """
    check_port(port, web)
    if web:
        if once or every_s or as_json:
            raise click.UsageError("--web prints nothing: remove --once, --watch and --json")
        from vjob.shelf.web.serve import serve_status

        serve_status(job, Path.cwd(), click.echo, port=port or 0)
        return
    if job is None:
        is_plain = once or as_json or every_s is not None
        _show_runs(show_all, as_json=as_json, is_plain=is_plain, interval_s=interval_s)
        return
    from vjob.shelf.screen.start import can_show, show

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
            click.clear() if can_draw(sys.stdout, os.environ) else click.echo()


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
    say(render(replace(snapshot, nodes=nodes), verdict, all_nodes=show_all))


def _is_over(snapshot: Snapshot) -> bool:
    return snapshot.record_state in ("ended", "refused")


def _show_runs(show_all: bool, *, as_json: bool, is_plain: bool, interval_s: float) -> None:
    from vjob.shelf.screen.start import can_show, show_runs

    if not is_plain and can_show(os.environ):
        sys.exit(show_runs(Path.cwd(), interval_s))
    from vjob.jobs.monitor.model.run_row import render_rows
    from vjob.jobs.monitor.readers.run_table import RunTable

    rows = RunTable(None if show_all else NUM_RUNS, budget_s=PLAIN_S).read()
    width = shutil.get_terminal_size((80, 24)).columns
    print_list(row.as_json() for row in rows) if as_json else click.echo(render_rows(rows, width))


@click.command()
@job_argument
@click.option("--follow", "-f", is_flag=True, help="Continue until the run has ended.")
@click.option("--node", "nodes", multiple=True, metavar="NAME",
              shell_complete=complete_by("complete_node"),
              help="Only this node (repeatable).")  # fmt: skip
@click.option(
    "--rank", "ranks", multiple=True, type=int, metavar="N", help="Only this rank (repeatable)."
)
@click.option("--grep", "pattern", metavar="REGEX", help="Only lines that match.")
@click.option("--err", "only_err", is_flag=True, help="Only standard error.")
@click.option("--attempt", type=int, help="Attempt (start of the ranks); default: the last.")
@click.option("--lines", "-n", type=int, help="Only the last N lines of each file.")
@click.option("--errors", is_flag=True, help="How the job ended, and the first error in context.")
@click.option("--raw", is_flag=True, help="Print file after file; merge no equal lines of ranks.")
@click.option("--times", "-t", "with_times", is_flag=True, help="Begin each line with its time.")
@click.option("--since", type=Moment(), metavar="TIME", help="Only lines from that time on.")
@click.option("--until", type=Moment(), metavar="TIME", help="Only lines up to that time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
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
    with_times: bool,
    since: float | None,
    until: float | None,
    as_json: bool,
) -> None:
    """Print the lines of JOB's nodes, or of some ranks, in the order of time.

    A line of standard error begins with `n060 err |`; a line that many ranks print alike begins
    with `x64 all ranks |`.

    \b
    vjob logs last --errors
    vjob logs last --rank 3 --grep loss
    vjob logs -f 4711 --node n060
    vjob logs last -t --since 14:30 --until 14:45
    vjob logs last --since 30m --grep "loss|nan"

    TIME is 14:30, 2026-11-23 14:30, or how long ago, as 30m. A line without a time of its own has
    the time of the line before; with these options, a file in which no line has a time is left out.
    """
    from vjob.jobs.monitor.log_lines import print_logs as reading
    from vjob.jobs.runs.foreign_job import find_run_or_job
    from vjob.jobs.schedulers.foreign_job import ForeignJob

    num_said = 0

    def tell(text: str) -> None:
        """Print a note that is not a line of the job on standard error, so that --json output is
        only JSON."""
        nonlocal num_said
        num_said += 1
        click.echo(text, err=as_json and not text.startswith("{"))

    run = find_run_or_job(job, Path.cwd())
    wanted = reading.LineFilter(
        nodes=nodes,
        ranks=ranks,
        pattern=pattern,
        only_err=only_err,
        raw=raw,
        paint=paint_rank,
        with_times=with_times,
        since=since,
        until=until,
        as_json=as_json,
    )
    if errors:
        from vjob.jobs.monitor.readers import first_error

        if isinstance(run, ForeignJob):
            first_error.print_job_errors(run, tell, wanted)
        else:
            first_error.print_errors(run, tell, wanted, attempt=attempt)
        return
    if isinstance(run, ForeignJob):
        from vjob.jobs.monitor.log_lines import job_logs

        if follow:
            sys.exit(job_logs.follow_job(run, tell, wanted))
        job_logs.print_job_logs(run, tell, wanted, num_lines=lines)
        return
    if follow:
        sys.exit(reading.follow_run(run, tell, wanted))
    reading.print_logs(run, tell, wanted, attempt=attempt, num_lines=lines)
    if not num_said and (since is not None or until is not None):
        earlier = "" if attempt is not None else "; --attempt N looks in an earlier attempt"
        say(f"vjob: no line is from that time, or the lines have no times{earlier}", err=True)


def paint_rank(text: str, rank: int | None) -> str:
    """Colour a rank's text differently from its neighbours'; click.echo drops colours in a pipe."""
    if not has_colours(os.environ):
        return text
    if rank is None:
        return click.style(text, bold=True)
    has_many = "256color" in os.environ["TERM"] or os.environ.get("COLORTERM")
    colours: Sequence[int | str] = COLOURS if has_many else FEW_COLOURS
    return click.style(text, fg=colours[rank % len(colours)])


@click.command()
@job_argument
@click.option(
    "--every",
    "every_s",
    type=Duration(least=1),
    default=WATCH_EVERY_S,
    show_default=True,
    metavar="SECONDS",
    help="Time between two checks.",
)
@click.option(
    "--for", "for_min", type=Duration(MINUTES), metavar="MINUTES", help="Stop after this time."
)
@click.option("--mail", metavar="ADDRESS", help="Address to mail notices to; default: notify.mail.")
@click.option(
    "--webhook",
    "webhook_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="POST notices to the URL in FILE; default: VJOB_WEBHOOK, then notify.webhook.",
)
@click.option("--command", metavar="SHELL", help="Command for notices; default: notify.command.")
@click.option("--quiet", is_flag=True, help="Send no notices, whatever the conf says.")
@click.option(
    "--on",
    "on",
    multiple=True,
    shell_complete=complete_by("complete_action"),
    metavar="VERDICT=ACTION",
    help="Action for a verdict: cancel, requeue or exclude (repeatable). Default: nothing.",
)
@click.option("--once", is_flag=True, help="Check once and exit; the same as --for 0.")
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
    once: bool,
    as_json: bool,
) -> None:
    """Check JOB regularly until it ends; print each change, and notify you.

    \b
    vjob watch last                           in tmux, with notify of the conf
    vjob watch 4711 --for 9m --every 1m       from cron, every ten minutes
    vjob watch last --on STALLED=requeue --mail me@example.org

    A notice is sent when two checks in a row give the same verdict, and again when the job is well.
    The exit code is that of the last verdict, as in `vjob status`.
    """
    from vjob.shelf.watch.desk import WatchOptions, run_watch

    for_min = 0.0 if once else for_min
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
    sys.exit(run_watch(job, Path.cwd(), options, say))


@click.command()
@job_argument
@click.option("--full", is_flag=True, help="Show all threads, and group ranks by all of them.")
@click.option("--native", is_flag=True, help="Also show frames of C, C++ and Cython.")
@click.option(
    "--wait",
    "wait_s",
    default=STACKS_WAIT_S,
    show_default=True,
    type=Duration(whole=True),
    metavar="SECONDS",
    help="Time that the nodes have to answer.",
)
@json_option
def stacks(job: str, full: bool, native: bool, wait_s: int, as_json: bool) -> None:
    """Show each rank's Python stack; identical stacks are grouped, smallest group first.

    In a hang, most ranks wait at the same place; the few ranks elsewhere are the suspects. py-spy
    stops each rank for a moment to read its stack; the job continues. Exits 1 if no stack could be
    read.

    \b
    vjob stacks last
    vjob stacks 4711 --full --native      all threads, and what runs below Python
    """
    from vjob.jobs.monitor.stacks.collect import collect_stacks
    from vjob.jobs.monitor.stacks.group import render_stacks
    from vjob.jobs.monitor.stacks.plain_job import collect_job_stacks
    from vjob.jobs.runs.find import view_run
    from vjob.jobs.runs.foreign_job import find_run_or_job
    from vjob.jobs.schedulers.foreign_job import ForeignJob

    run = find_run_or_job(job, Path.cwd())
    line = StatusLine()

    def tell(done: int, num_nodes: int) -> None:
        line.show(f"{done} of {num_nodes} nodes have answered")

    try:
        if isinstance(run, ForeignJob):
            found = collect_job_stacks(run, native=native, whole=full, timeout_s=wait_s, tell=tell)
        else:
            view = view_run(run)
            found = collect_stacks(view, native=native, whole=full, timeout_s=wait_s, tell=tell)
    finally:
        line.clear()
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        say(render_stacks(found, whole=full))
    sys.exit(0 if found.groups else 1)


@click.command()
@job_argument
@click.argument("what", type=click.Choice(("pause", "resume")))
def guard(job: str, what: str) -> None:
    """Pause or resume what JOB's nodes do about a hang.

    The action is set by `on_hang` in the conf of JOB. Pause it before you stop a rank, or attach a
    debugger, for longer than half a minute.

    \b
    vjob guard last pause
    vjob guard last resume
    """
    import getpass
    import time

    from varuna_core.hang.signs import pause_guard
    from vjob.jobs.runs.find import find_run
    from vjob.jobs.runs.owner import expect_ours

    run = find_run(job, Path.cwd())
    expect_ours(run, "nodes of a run obey files in its folder")
    pause_guard(run, is_paused=what == "pause", by=getpass.getuser(), at=time.time())
    if what == "pause":
        say(f"nothing is done about hangs of {run.path.name} until `vjob guard {job} resume`")
    else:
        say(f"vjob handles hangs of {run.path.name} as its conf says")


@click.command(context_settings={"ignore_unknown_options": True})
@job_argument
@click.option("--node", metavar="NODE", help="The node's name or index; default: the first.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def shell(job: str, node: str | None, command: tuple[str, ...]) -> None:
    """Open a shell on a node of JOB, in the ranks' container if it has one, or run COMMAND there.

    The shell has the environment, mounts and working directory of the ranks. The exit code is that
    of the shell or of COMMAND.

    \b
    vjob shell last
    vjob shell 4711 --node a3 -- uptime
    """
    from vjob.jobs.errors import InputError
    from vjob.jobs.monitor.stacks.shell import open_shell
    from vjob.jobs.runs.find import view_run
    from vjob.jobs.runs.foreign_job import find_run_or_job
    from vjob.jobs.schedulers.foreign_job import ForeignJob

    run = find_run_or_job(job, Path.cwd())
    if isinstance(run, ForeignJob):
        raise InputError(f"{job} is not a run of vjob: `srun --jobid {job} --overlap --pty bash`")
    sys.exit(open_shell(view_run(run), node, command))

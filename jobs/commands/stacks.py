"""`vjob stacks`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from vjob.jobs.commands.arguments import job_argument, json_option

DEADLINE_S = 60


@click.command()
@job_argument
@click.option("--full", is_flag=True, help="All threads, and the same stacks only if all agree.")
@click.option("--native", is_flag=True, help="Also frames of C, C++ and Cython.")
@click.option(
    "--wait",
    "wait_s",
    default=DEADLINE_S,
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

"""`vjob watch`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from vjob.jobs.commands.arguments import job_argument, json_option

EVERY_S = 30.0


@click.command()
@job_argument
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=1),
    default=EVERY_S,
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
    from vjob.jobs.monitor.watch.desk import Wishes, run_watch

    wishes = Wishes(
        mail=mail,
        webhook_file=webhook_file,
        command=command,
        quiet=quiet,
        on=on,
        every_s=every_s,
        for_min=for_min,
        as_json=as_json,
    )
    sys.exit(run_watch(job, Path.cwd(), wishes))

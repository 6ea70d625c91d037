"""What a command says and does once a job was submitted."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping

import click

from varuna_core.records.record import RunRecord
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.submit.submit import look_for_trouble

CANCEL_S = 60
"""For ranks to save in after Ctrl-C."""


def tell_submitted(
    run: RunFolder,
    record: RunRecord,
    more: Mapping[str, str],
    *,
    as_json: bool,
    follow: bool,
) -> None:
    """The job and where its files are, `more` first; then warnings, and its lines if followed."""
    ids = [job.id for job in record.jobs]
    if as_json:
        click.echo(json.dumps({"run": run.name, "folder": str(run.path), "jobs": ids, **more}))
    else:
        click.echo(f"submitted {run.name} as job {', '.join(ids)} ({record.scheduler})")
        look = {"status": f"vjob status {ids[0]}", "logs": f"vjob logs -f {ids[0]}"}
        for label, text in {**more, "files": str(run.path), **look}.items():
            click.echo(f"  {label:<8}{text}")
    for warning in look_for_trouble(run):
        click.echo(f"vjob: {warning}", err=True)
    if follow:
        sys.exit(_follow(run, record))


def _follow(run: RunFolder, record: RunRecord) -> int:
    """The exit code. On a list of machines nobody but us keeps the run: Ctrl-C ends it."""
    from vjob.jobs.monitor.log_lines.print_logs import follow_run

    try:
        return follow_run(run, click.echo)
    except KeyboardInterrupt:
        if record.scheduler != "ssh":
            raise
    from vjob.jobs.runs.cancel import cancel_run

    click.echo(cancel_run(run, now=False, wait_s=CANCEL_S, say=click.echo))
    return 128 + signal.SIGINT

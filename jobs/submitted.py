"""What a command says and does once a job was submitted."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import click

from jobs.submit import look_for_trouble
from varuna_core.records.record import RunRecord
from varuna_core.records.runfolder import RunFolder


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
        from jobs.logs import follow_run

        sys.exit(follow_run(run, click.echo))

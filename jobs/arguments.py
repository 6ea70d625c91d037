"""Arguments and options that several commands share."""

from __future__ import annotations

import click


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion of JOB: names, runs and job ids from the index."""
    from jobs.listing import known_jobs

    return [word for word in known_jobs() if word.startswith(incomplete)]


job_argument = click.argument("job", shell_complete=complete_job)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")

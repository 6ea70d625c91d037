"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion of JOB: names, runs and job ids from the index."""
    from vjob.jobs.runs.listing import known_jobs

    return [word for word in known_jobs() if word.startswith(incomplete)]


def complete_sweep(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion of a sweep's name."""
    from vjob.jobs.schedulers.run_index import list_sweeps

    return [word for word in list_sweeps() if word.startswith(incomplete)]


job_argument = click.argument("job", shell_complete=complete_job)
conf_argument = click.argument("conf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one key, such as --set parallel.pipeline=4.",
)
after_option = click.option(
    "--after",
    multiple=True,
    metavar="JOB",
    shell_complete=complete_job,
    help="Start once JOB has ended well; never if it has not.",
)
after_any_option = click.option(
    "--after-any",
    multiple=True,
    metavar="JOB",
    shell_complete=complete_job,
    help="Start once JOB has ended, however it did.",
)
sweep_option = click.option(
    "--sweep",
    metavar="NAME",
    shell_complete=complete_sweep,
    help="The runs of this sweep.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")

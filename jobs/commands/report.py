"""`vjob report` and `vjob compare`: where the time of a job went, and how jobs differ."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from vjob.jobs.commands.arguments import complete_job, job_argument, json_option


@click.command()
@job_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the page goes; default: report.html in JOB's folder.",
)
@click.option("--open", "is_opened", is_flag=True, help="Show the page in a browser.")
@click.option("--cdn", is_flag=True, help="Link plotly instead of embedding it: 2 MB less.")
@click.option("--text", is_flag=True, help="Print the report in the terminal.")
@click.option(
    "--csv",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write every table as CSV.",
)
@click.option(
    "--parquet",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write every table as Parquet.",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a timeline for ui.perfetto.dev, such as trace.json.gz.",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a picture of the page; needs Chromium or Chrome.",
)
def report(
    job: str,
    output: Path | None,
    is_opened: bool,
    cdn: bool,
    text: bool,
    csv: Path | None,
    parquet: Path | None,
    trace: Path | None,
    png: Path | None,
) -> None:
    """Say where JOB's time went, and what to change: one page that opens anywhere.

    JOB may also be a folder of per-node logs, such as log2/10932251, or one log. A page is written
    unless only other things are asked for.

    \b
    vjob report last --open
    vjob report last --text
    vjob report log2/10932251 -o page.html --csv tables
    vjob report gpt2-xl --trace trace.json.gz
    """
    from vjob.jobs.reporting.report import ReportOutputs, write_report

    wanted = ReportOutputs(
        text=text,
        csv=csv,
        parquet=parquet,
        trace=trace,
        page=output,
        png=png,
        cdn=cdn,
        is_opened=is_opened,
    )
    write_report(job, Path.cwd(), click.echo, wanted)


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a page instead.",
)
@click.option("--cdn", is_flag=True, help="Link plotly instead of embedding it: 2 MB less.")
@json_option
def compare(jobs: tuple[str, ...], output: Path | None, cdn: bool, as_json: bool) -> None:
    """Hold two or more JOBs against each other: times, idle parts, memory, losses, confs.

    The name of a sweep stands for its runs: their final figures against what was swept, the least
    loss first. With -o a page that draws them.

    \b
    vjob compare 4711 last
    vjob compare log2/10932251 log2/10932252 -o compared.html
    vjob compare lr-search -o lr-search.html
    """
    from vjob.jobs.reporting.compare import compare_jobs

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    compare_jobs(jobs, Path.cwd(), click.echo, as_json=as_json, page=output, cdn=cdn, width=width)

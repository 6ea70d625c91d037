"""`vjob report` and `vjob compare`: show where a job's time went, and how jobs differ."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from vjob.reports.export.formats import EXPORTERS
from vjob.shelf.commands.arguments import (
    OutputFile,
    complete_job,
    job_argument,
    json_option,
)
from vjob.shelf.commands.terminal import find_width, say


@click.command()
@job_argument
@click.option(
    "-o",
    "--output",
    type=OutputFile(may_be_folder=True),
    metavar="PATH",
    help="File for the page or export; default: report.html in JOB's folder, or JOB's name.",
)
@click.option("--open", "is_opened", is_flag=True, help="Show the page in a browser.")
@click.option("--text", is_flag=True, help="Print the report in the terminal.")
@click.option(
    "--export",
    type=click.Choice(EXPORTERS.list_names()),
    help="Write tables, or a timeline for ui.perfetto.dev.",
)
@json_option
def report(
    job: str,
    output: Path | None,
    is_opened: bool,
    text: bool,
    export: str | None,
    as_json: bool,
) -> None:
    """Show where JOB's time went, and what to change: one page that opens anywhere.

    JOB may also be a folder of per-node logs, such as log2/10932251, or one log. A page is written
    unless only other things are asked for.

    \b
    vjob report last --open
    vjob report last --text
    vjob report last --json | jq .headline.goodput.value
    vjob report log2/10932251 -o page.html
    vjob report gpt2-xl --export parquet -o tables
    vjob report gpt2-xl --export perfetto
    """
    from vjob.jobs.reporting.report import ReportOutputs, write_report

    if output is not None and output.is_dir() and export in (None, "perfetto"):
        raise click.BadParameter(f"{output} is a folder: give a file in it", param_hint="-o")
    wanted = ReportOutputs(
        text=text,
        export=export,
        output=output,
        is_opened=is_opened,
        as_json=as_json,
    )

    def tell(text: str) -> None:
        """Print the names of written files on standard error, so that --json output is only
        JSON."""
        if text.startswith("{"):
            click.echo(text)
        else:
            say(text, err=as_json)

    write_report(job, Path.cwd(), tell, wanted)


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    metavar="FILE",
    help="Write a page instead.",
)
@json_option
def compare(jobs: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Compare two or more jobs: times, idle parts, memory, losses, confs.

    The name of a sweep stands for its runs: their final figures against what was swept, the least
    loss first. With -o a page that draws them.

    \b
    vjob compare 4711 last
    vjob compare log2/10932251 log2/10932252 -o compared.html
    vjob compare lr-search -o lr-search.html
    """
    from vjob.shelf.compare import compare_jobs

    width = find_width(sys.stdout)

    def tell(text: str) -> None:
        click.echo(text, err=as_json and not text.startswith("{"))

    compare_jobs(jobs, Path.cwd(), tell, as_json=as_json, page=output, width=width)

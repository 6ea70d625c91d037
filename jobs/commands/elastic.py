"""`vjob grow`, `vjob shrink` and `vjob tend`: nodes of a run that may morph come and go."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from vjob.jobs.commands.arguments import job_argument, json_option
from vjob.jobs.errors import InputError


@click.command()
@job_argument
@click.option("--count", type=int, required=True, metavar="N", help="How many nodes.")
@click.option("--queue", metavar="NAME", help="Their Slurm partition; default: the run's first.")
@click.option(
    "--walltime-min", type=click.IntRange(min=1), metavar="MIN", help="Default: as the run's."
)
@json_option
def grow(job: str, count: int, queue: str | None, walltime_min: int | None, as_json: bool) -> None:
    """Submit a job of N nodes that joins JOB, a run that may morph.

    The nodes are like those of the run's group with that queue, else like its first group. Once
    they are there the run saves, and goes on with them; their job ends with the run.

    \b
    vjob grow last --count 4 --queue gpu2
    """
    from vjob.jobs.elastic import membership
    from vjob.jobs.runs.find import find_run

    run = find_run(job, Path.cwd())
    join, added = membership.grow(run, count=count, queue=queue, walltime_min=walltime_min)
    if as_json:
        facts = {"run": run.name, "job": added, "group": join.name, "count": count}
        click.echo(json.dumps(facts))
        return
    nodes = "a node" if count == 1 else f"{count} nodes"
    click.echo(f"job {added} brings {nodes} to {run.name} when it starts")
    click.echo(f"  status  vjob status {run.name}")
    click.echo(f"  log     {run.scheduler_log(join.name)}")


@click.command()
@job_argument
@click.option("--count", type=int, metavar="N", help="How many nodes; the last to come go first.")
@click.option("--node", "nodes", multiple=True, metavar="HOST", help="This node (repeatable).")
def shrink(job: str, count: int | None, nodes: tuple[str, ...]) -> None:
    """Let nodes of JOB, a run that may morph, go at its next checkpoint.

    A job that joined ends when all of its nodes have left. Nodes of the run's own job stay in that
    job, unused, until it ends.

    \b
    vjob shrink last --count 2
    vjob shrink last --node b3
    """
    from vjob.jobs.elastic import membership
    from vjob.jobs.runs.find import find_run

    if (count is None) == (not nodes):
        raise InputError("say how many nodes (--count N) or which (--node HOST), one of the two")
    for text in membership.shrink(find_run(job, Path.cwd()), count=count, hosts=nodes):
        click.echo(text)


@click.command()
@job_argument
def tend(job: str) -> None:
    """Look after JOB as `morph.grow` and `morph.leave_slow` of its conf say, to its end.

    The batch script runs this beside the run. Where a compute node may not submit jobs, run it on
    the login node: one of them is enough, and a second one ends at once.

    \b
    vjob tend last
    """
    from vjob.jobs.elastic.autoscale import run_autoscaler
    from vjob.jobs.runs.find import find_run

    def say(text: str) -> None:
        click.echo(f"tend: {text}", err=True)

    sys.exit(run_autoscaler(find_run(job, Path.cwd()), say))

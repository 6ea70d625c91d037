"""`vjob grow`, `vjob shrink` and `vjob tend`: nodes of a run that may morph come and go."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from vjob.jobs.conf.quantities import MINUTES
from vjob.jobs.errors import InputError
from vjob.shelf.commands.arguments import (
    Duration,
    complete_by,
    job_argument,
    json_option,
    print_object,
)
from vjob.shelf.commands.terminal import say


@click.command()
@job_argument
@click.option("--count", type=int, required=True, metavar="N", help="How many nodes.")
@click.option(
    "--queue",
    metavar="NAME",
    shell_complete=complete_by("complete_queue"),
    help="Their Slurm partition; default: the run's first.",
)
@click.option(
    "--walltime-min",
    type=Duration(MINUTES, least=1, whole=True),
    metavar="MINUTES",
    help="Default: as the run's.",
)
@json_option
def grow(job: str, count: int, queue: str | None, walltime_min: int | None, as_json: bool) -> None:
    """Add N nodes to JOB, an elastic run (`morph.enabled`).

    A job is submitted for them. They are like those of the run's group with that queue, else like
    its first group. Once they are there the run saves and continues with them; their job ends with
    the run.

    \b
    vjob grow last --count 4 --queue gpu2
    """
    from vjob.jobs.elastic import membership
    from vjob.jobs.runs.find import find_run

    run = find_run(job, Path.cwd())
    join, added = membership.grow(run, count=count, queue=queue, walltime_min=walltime_min)
    if as_json:
        facts = {"run": run.name, "job": added, "group": join.name, "count": count}
        print_object(facts, is_line=True)
        return
    nodes = "a node" if count == 1 else f"{count} nodes"
    say(f"job {added} brings {nodes} to {run.name} when it starts")
    click.echo(f"  status  vjob status {run.name}")
    click.echo(f"  log     {run.scheduler_log(join.name)}")


@click.command()
@job_argument
@click.option("--count", type=int, metavar="N", help="How many nodes; the last to come go first.")
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="HOST",
    shell_complete=complete_by("complete_node"),
    help="This node (repeatable).",
)
@json_option
def shrink(job: str, count: int | None, nodes: tuple[str, ...], as_json: bool) -> None:
    """Remove nodes from JOB, an elastic run, at its next checkpoint.

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
    run = find_run(job, Path.cwd())
    said = membership.shrink(run, count=count, hosts=nodes)
    if as_json:
        print_object({"run": run.name, "messages": list(said)}, is_line=True)
        return
    for text in said:
        say(text)


@click.command()
@job_argument
@json_option
def tend(job: str, as_json: bool) -> None:
    """Add idle nodes to JOB and drop slow ones automatically.

    As `morph.grow` and `morph.leave_slow` of its conf say, to its end.

    The batch script runs this beside the run. Where a compute node may not submit jobs, run it on
    the login node: one of them is enough, and a second one ends at once. With --json each line is
    an object, on standard output.

    \b
    vjob tend last
    """
    from vjob.jobs.runs.find import find_run
    from vjob.shelf.elastic.autoscale import run_autoscaler

    run = find_run(job, Path.cwd())

    def tell(text: str) -> None:
        if as_json:
            print_object({"time": time.time(), "run": run.name, "message": text}, is_line=True)
        else:
            say(f"tend: {text}", err=True)

    sys.exit(run_autoscaler(run, tell))

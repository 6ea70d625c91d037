"""Commands on existing runs: list, cancel, grow, shrink, prune and share."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from vjob.jobs.conf.quantities import DAYS, MINUTES
from vjob.jobs.errors import InputError
from vjob.shelf.commands.arguments import (
    Duration,
    complete_by,
    complete_job,
    job_argument,
    json_option,
    print_list,
    print_object,
    sweep_option,
)
from vjob.shelf.commands.terminal import find_width, say


@click.command(name="list")
@click.option("--all", "-a", "show_all", is_flag=True, help="Show all runs, not only the last 20.")
@sweep_option
@json_option
def list_(show_all: bool, sweep: str | None, as_json: bool) -> None:
    """List your runs, the newest last.

    \b
    vjob list
    vjob list --all --json | jq -r '.[].run'
    vjob list --sweep lr-search            with the values that were swept
    """
    from vjob.jobs.runs import listing

    width = find_width(sys.stdout)
    if sweep is not None:
        rows = listing.list_sweep(sweep)
        print_list(rows) if as_json else click.echo(listing.render_sweep(rows, width))
        return
    rows = listing.list_runs(limit=None if show_all else 20)
    print_list(rows) if as_json else click.echo(listing.render(rows, width))


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=complete_job)
@sweep_option
@click.option("--now", is_flag=True, help="Do not ask the ranks to checkpoint first.")
@click.option(
    "--wait",
    "wait_s",
    default=60,
    show_default=True,
    type=Duration(whole=True),
    metavar="SECONDS",
    help="Time for the ranks to checkpoint and exit.",
)
@json_option
def cancel(jobs: tuple[str, ...], sweep: str | None, now: bool, wait_s: int, as_json: bool) -> None:
    """Cancel JOBs, or all runs of a sweep; ranks that can are asked to checkpoint first.

    Ranks that have a handler for SIGUSR1 count as able to checkpoint.

    \b
    vjob cancel last
    vjob cancel 4711 --wait 5m       a large checkpoint on a slow file system
    vjob cancel 4711 4712 gpt2-xl --now
    vjob cancel --sweep lr-search
    """
    from vjob.jobs.runs.cancel import cancel_run, cancel_runs, describe_cancelled
    from vjob.jobs.runs.find import find_run
    from vjob.jobs.runs.listing import find_sweep

    def tell(text: str) -> None:
        say(text, err=as_json)

    if bool(jobs) == (sweep is not None):
        raise InputError("give one or more JOBs, or --sweep NAME")
    if sweep is not None:
        runs = find_sweep(sweep)
    else:  # each once, however it is named
        runs = list({run.path: run for run in (find_run(job, Path.cwd()) for job in jobs)}.values())
    is_one = sweep is None and len(runs) == 1
    if is_one:
        text = cancel_run(runs[0], now=now, wait_s=wait_s, say=tell)
    else:
        text = cancel_runs(runs, now=now, wait_s=wait_s, say=tell)
    if as_json:
        print_object(describe_cancelled(runs, text))
    else:
        say(text)


@click.command()
@click.argument(
    "folder",
    required=False,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option(
    "--days",
    default=30.0,
    show_default=True,
    type=Duration(DAYS),
    metavar="DAYS",
    help="Choose runs in which nothing has been written for this long.",
)
@click.option(
    "--keep",
    default=0,
    type=click.IntRange(min=0),
    metavar="N",
    help="Keep the newest N runs of each name, however old.",
)
@click.option(
    "--checkpoints",
    is_flag=True,
    help="Also choose runs with checkpoints, results or other files of their ranks.",
)
@click.option("--delete", is_flag=True, help="Remove the runs; without it they are only listed.")
@click.option("--all", "-a", "show_all", is_flag=True, help="Also list the runs that are kept.")
@json_option
def prune(
    folder: Path | None,
    days: float,
    keep: int,
    checkpoints: bool,
    delete: bool,
    show_all: bool,
    as_json: bool,
) -> None:
    """List old runs that have ended, or remove them: those of FOLDER, a folder of logs, or all that
    `vjob list --all` knows.

    A run is removed as a whole, with its conf, logs and traces; checkpoints outside its folder are
    never touched. A run is kept if it still runs, if its end is not known, if it belongs to another
    user, or if a waiting run depends on it. After Ctrl-C, each run is either complete or removed.

    \b
    vjob prune                               what would go
    vjob prune --days 90 --keep 5 --delete
    vjob prune log --all --json | jq '.[] | [.run, .size_bytes, .kept]'
    """
    from vjob.shelf import prune as pruning

    wanted = pruning.Wanted(days=days, keep=keep, checkpoints=checkpoints)
    found = pruning.choose_runs(wanted, folder)
    if not as_json:
        table = pruning.render(found, find_width(sys.stdout), show_kept=show_all)
        click.echo(table)
    problems, num_removed = {}, 0
    try:
        for path in pruning.list_hidden(found, folder) if delete else ():
            problems[str(path)] = pruning.remove_hidden(path)
        for one in found:
            if delete and not one.kept:
                problems[one.folder] = pruning.remove_run(one)
                num_removed += not problems[one.folder]
    except KeyboardInterrupt:
        done = pruning.count_runs(num_removed)
        say(f"vjob: interrupted; {done} removed, the same command continues", err=True)
        sys.exit(130)
    for name, problem in problems.items():
        if problem:
            say(f"vjob: {Path(name).name}: not all removed: {problem}", err=True)
    if as_json:
        print_list(pruning.as_row(one, delete, problems.get(one.folder, "")) for one in found)
    else:
        say(pruning.conclude(found, num_removed, delete=delete))
    sys.exit(1 if any(problems.values()) else 0)


@click.command()
@job_argument
@click.option(
    "--group",
    metavar="NAME",
    shell_complete=complete_by("complete_group"),
    help="Share JOB with this group of yours.",
)
@click.option("--private", is_flag=True, help="Close it again.")
@click.option("--anyway", is_flag=True, help="Also share files in which a secret was found.")
@click.option("--dry-run", is_flag=True, help="Show what would be shared; change nothing.")
@click.option(
    "--show-what", is_flag=True, help="Like --dry-run; also list the files, withheld too."
)
@json_option
def share(
    job: str,
    group: str | None,
    private: bool,
    anyway: bool,
    dry_run: bool,
    show_what: bool,
    as_json: bool,
) -> None:
    """Let a group read JOB with status, logs, report and compare; secrets are kept back.

    Only files of certain kinds are shared: confs, records, events, logs, traces. All other files
    stay private: values of the environment, scripts, code, pickles. A file that contains a secret,
    one of this run or one known by its name or shape (ghp_..., AKIA...), is kept back and named
    with the line; a conf, patch or list of packages also for each word that looks random. Files to
    which a running JOB still writes stay shared, whatever is written later; to share the files of a
    later attempt, run `vjob share` again.

    \b
    vjob share last --group ml --dry-run   what they would see
    vjob share last --group ml --show-what # every file, each word that is held
    vjob share last --group ml             they type: vjob status /path/of/the/run
    vjob share last --private
    """
    from vjob.jobs.runs.find import find_run
    from vjob.shelf import share as sharing

    if (group is None) != private:
        raise InputError("give either --group NAME to share it, or --private to close it")
    if private and (anyway or dry_run or show_what):
        raise InputError("--anyway, --dry-run and --show-what need --group")
    run = find_run(job, Path.cwd())
    if group is None:
        num_files = sharing.close_run(run)
        said: dict[str, Any] = {"run": run.name, "private": num_files}
        text = f"{run.name} is private again: {num_files} files"
    else:
        shared = sharing.share_run(run, group, is_preview=dry_run or show_what, anyway=anyway)
        said, text = shared.as_json(), sharing.render_shared(shared, is_preview=dry_run)
        if show_what:
            text = sharing.render_what(shared)
    if as_json:
        print_object(said)
    else:
        say(text)


@click.command()
@job_argument
@click.option("--count", type=int, required=True, metavar="N", help="How many nodes.")
@click.option(
    "--queue",
    metavar="NAME",
    shell_complete=complete_by("complete_queue"),
    help="Slurm partition of the new nodes; default: the run's first.",
)
@click.option(
    "--walltime-min",
    type=Duration(MINUTES, least=1, whole=True),
    metavar="MINUTES",
    help="Time limit of the new nodes; default: the run's.",
)
@json_option
def grow(job: str, count: int, queue: str | None, walltime_min: int | None, as_json: bool) -> None:
    """Add N nodes to JOB, an elastic run (`morph.enabled`).

    A job is submitted for the new nodes, which are like those of the run's group with the given
    queue, or else like its first group. Once they are present, the run saves and continues with
    them; their job ends with the run.

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
    say(f"job {added} adds {nodes} to {run.name} when it starts")
    click.echo(f"  status  vjob status {run.name}")
    click.echo(f"  log     {run.scheduler_log(join.name)}")


@click.command()
@job_argument
@click.option("--count", type=int, metavar="N", help="Number of nodes; the last to join leave.")
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
        raise InputError("give either the number of nodes (--count N) or their names (--node HOST)")
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

    Works until JOB ends, as set by `morph.grow` and `morph.leave_slow` in its conf.

    The batch script starts this command beside the run. Where compute nodes may not submit jobs,
    run it on the login node: one such process is enough, and a second one ends at once. With --json
    each line is an object, on standard output.

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

"""Commands that start from a conf: `vjob submit` and `profile`."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vjob.jobs.errors import InputError
from vjob.shelf.commands.arguments import (
    after_any_option,
    after_option,
    complete_by,
    complete_job,
    conf_argument,
    json_option,
    print_list,
    print_object,
    set_option,
)
from vjob.shelf.commands.terminal import StatusLine, say

if TYPE_CHECKING:
    from varuna_core.records.plan import Plan
    from varuna_core.records.record import RunRecord
    from varuna_core.records.runfolder import RunFolder
    from vjob.jobs.api.executor import VjobExecutor
    from vjob.jobs.conf.schema import JobConf
    from vjob.jobs.planning.resolve_auto import Resolved
    from vjob.jobs.submit.chain import AfterRuns
    from vjob.jobs.submit.submit import Prepared
    from vjob.jobs.submit.sweep import Sweep

CANCEL_S = 60
"""Seconds that ranks get to save a checkpoint after Ctrl-C."""


@click.command()
@click.argument("conf", required=False, type=click.Path(exists=True, path_type=Path))
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS]")
@click.option(
    "--like",
    metavar="JOB",
    shell_complete=complete_job,
    help="In place of CONF: run what JOB ran, with its code if it has a copy.",
)
@set_option
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A layout that `vjob plan --write` chose; --set overrides it.",
)
@after_option
@after_any_option
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    shell_complete=complete_by("complete_key"),
    metavar="KEY=A,B",
    help="One run for each value; with several keys, one for each combination.",
)
@click.option(
    "--sweep-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="CSV",
    help="One run per row; the first row has the keys.",
)
@click.option("--sweep-name", metavar="NAME", help="Name of the sweep; default: by conf and time.")
@click.option(
    "--at-most",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of runs of a sweep at once; each waits for the one N before it.",
)
@click.option("--new-job", is_flag=True, help="Submit a new job, even from a shell inside one.")
@click.option("--dry-run", is_flag=True, help="Print the scripts; write and submit nothing.")
@click.option(
    "--check-against",
    type=click.Path(exists=True, path_type=Path),
    metavar="SCRIPT",
    help="With --dry-run: show how the program's arguments differ from a script's.",
)
@click.option("--test-only", is_flag=True, help="Ask Slurm when and where the job would start.")
@click.option("--follow", "-f", is_flag=True, help="Follow the run's lines to its end.")
@json_option
def submit(
    conf: Path | None,
    like: str | None,
    overrides: tuple[str, ...],
    plan_file: Path | None,
    after: tuple[str, ...],
    after_any: tuple[str, ...],
    sweeps: tuple[str, ...],
    sweep_file: Path | None,
    sweep_name: str | None,
    at_most: int | None,
    new_job: bool,
    dry_run: bool,
    check_against: Path | None,
    arguments: tuple[str, ...],
    test_only: bool,
    follow: bool,
    as_json: bool,
) -> None:
    """Submit CONF: to its list of machines, to Slurm if sbatch is installed, else to this machine.

    In a shell that is inside a job of Slurm it runs in that job (docs/allocation.md).

    \b
    vjob submit conf.yaml --dry-run | less
    vjob submit conf.yaml --dry-run --check-against _03_submit.sh
    vjob submit conf.yaml --dry-run --check-against train.sh -- 8 big.yaml
    vjob submit conf.yaml --set cluster.nodes[0].count=4 --follow
    vjob submit conf.yaml --set cluster.machine_list=available_machines.out
    vjob submit conf.yaml --after last             starts when that has ended well
    vjob submit conf.yaml --sweep train.optimizer.lr=1e-4,3e-4 --at-most 4
    vjob submit --like last --set program.args[1]=0.1
    """
    from vjob.jobs.planning.plan_file import describe_partition, describe_promise, read_plan_file
    from vjob.jobs.planning.resolve_auto import resolve_conf
    from vjob.jobs.programs.start import refuse_function
    from vjob.jobs.submit import submit as submitting
    from vjob.jobs.submit.chain import find_after

    if check_against is not None and (not dry_run or sweeps or sweep_file):
        raise InputError("--check-against needs --dry-run and a single run")
    if arguments and check_against is None:
        raise InputError(f"{arguments[0]}: give one conf; only --check-against takes arguments")
    if (conf is None) == (like is None):
        raise InputError("give a conf, or --like JOB: vjob submit conf.yaml")
    if new_job:
        from vjob.jobs.schedulers.choose import override_job

        overrides = (*overrides, *override_job())
    before = find_after(after, after_any, Path.cwd())
    plan = None if plan_file is None else read_plan_file(plan_file, overrides)
    if sweeps or sweep_file:
        from vjob.jobs.submit.sweep import find_rows, prepare_sweep

        if test_only or follow:
            raise InputError("--test-only and --follow need a single run, but a sweep has many")
        if conf is None:
            raise InputError("a sweep needs a conf: give conf.yaml in place of --like")
        sweep = prepare_sweep(
            conf,
            find_rows(sweeps, sweep_file, overrides),
            overrides=overrides,
            name=sweep_name,
            plan=plan,
            at_most=at_most,
            for_preview=dry_run,
            progress=_show_progress("checked"),
        )
        _submit_sweep(sweep, before, dry_run=dry_run, as_json=as_json)
        return
    if sweep_name is not None or at_most is not None:
        raise InputError("--sweep-name and --at-most need a sweep: give --sweep or --sweep-file")
    snapshot = None
    if like is not None:
        from vjob.jobs.runs.find import find_run
        from vjob.jobs.submit.like import resolve_like

        again = resolve_like(
            find_run(like, Path.cwd()), overrides, plan=plan, require_env=not dry_run
        )
        resolved, snapshot = again.resolved, again.snapshot
        if again.warning:
            say(f"vjob: {again.warning}", err=True)
    else:
        assert conf is not None, "CONF or --like is given"
        resolved = resolve_conf(conf, overrides, plan=plan, require_env=not dry_run)
    refuse_function(resolved.conf)
    if dry_run:
        ready = submitting.prepare(resolved, for_preview=True, snapshot=snapshot)
        if check_against is not None:
            sys.exit(_check(ready, check_against, arguments, as_json=as_json))
        preview_run(ready, before, as_json)
        return
    if test_only:
        from vjob.jobs.submit import preview

        ready = submitting.prepare(resolved, snapshot=snapshot)
        estimates = preview.test_only(ready)
        if as_json:
            print_object(preview.describe_estimates(ready, estimates))
        else:
            say("\n".join(one.text for one in estimates.values()))
        return
    say_message(resolved, as_json=as_json)
    executor = make_executor(resolved)
    ready = submitting.prepare(resolved, snapshot=snapshot)
    run, record = submitting.submit_prepared(ready, after=before, executor=executor)
    promise = describe_promise(ready.plan) or describe_partition(resolved.conf)
    more = {"plan": promise} if promise else {}
    if ready.launch.why:
        more["launch"] = str(ready.launch)
    print_submitted(run, record, ready.plan, more, as_json=as_json, follow=follow)


def _check(ready: Prepared, script: Path, args: Sequence[str], *, as_json: bool) -> int:
    """Show how the program's arguments differ from the script's; return 1 if they do."""
    from vjob.shelf.importers import compare

    found = compare.compare_program(ready.plan, script, os.environ, args)
    if as_json:
        print_object(compare.describe_comparison(found))
    else:
        say(compare.render_comparison(found, shlex.join))
    return int(bool(found.differences))


def preview_run(ready: Prepared, after: AfterRuns, as_json: bool) -> None:
    from vjob.jobs.submit import preview

    if as_json:
        print_object(preview.describe_preview(ready, after))
    else:
        click.echo(preview.render_preview(ready, after), nl=False)


def _show_progress(word: str) -> Callable[[int, int], None]:
    """Return a function that shows progress as a line on a terminal, and erases it at the end."""
    line = StatusLine()

    def show(done: int, total: int) -> None:
        if done < total:
            line.show(f"{done} of {total} {word}")
        else:
            line.clear()

    return show


def _submit_sweep(sweep: Sweep, after: AfterRuns, *, dry_run: bool, as_json: bool) -> None:
    """Show a sweep; unless `dry_run`, submit its runs one by one and print how to follow them."""
    if dry_run:
        from vjob.jobs.submit import preview

        if as_json:
            print_object(preview.describe_sweep_preview(sweep, after))
        else:
            click.echo(preview.render_sweep_preview(sweep, after), nl=False)
        return
    from vjob.jobs.submit.submit import find_warnings
    from vjob.jobs.submit.sweep import build_json, render_submitted, submit_sweep

    say_message(sweep.runs[0].ready.resolved, as_json=as_json)
    count, show = 0, _show_progress("submitted")

    def progress(done: int, total: int) -> None:
        nonlocal count
        count = done
        show(done, total)

    try:
        executor = make_executor(sweep.runs[0].ready.resolved)
        submitted = submit_sweep(sweep, executor=executor, after=after, progress=progress)
    except KeyboardInterrupt:
        if count == 0:
            raise
        click.echo(
            f"\nvjob: interrupted; {count} of {len(sweep.runs)} runs of {sweep.name} were "
            f"submitted and continue: `vjob cancel --sweep {sweep.name}` ends them",
            err=True,
        )
        sys.exit(130)
    finally:
        show(0, 0)
    if as_json:
        print_list(build_json(submitted))
    else:
        say(render_submitted(sweep, submitted))
    for warning in find_warnings(submitted[0][0], sweep.runs[0].ready.plan):
        say(f"vjob: {warning}", err=True)


def say_message(resolved: Resolved, *, as_json: bool) -> None:
    """Print the site's message of the day, if the reader is a person."""
    if resolved.site.message and not as_json and sys.stderr.isatty():
        say(resolved.site.message, err=True)


def make_executor(resolved: Resolved) -> VjobExecutor:
    """Return the executor that `submitit.AutoExecutor(cluster="vjob")` finds, too."""
    from vjob.jobs.api.executor import VjobExecutor  # submitit, which only a submit pays for

    return VjobExecutor(resolved.conf.log_folder)


def print_submitted(
    run: RunFolder,
    record: RunRecord,
    plan: Plan,
    more: Mapping[str, str],
    *,
    as_json: bool,
    follow: bool,
    err: bool = False,
) -> None:
    """Print the job and the place of its files, then warnings, then the job's lines if it is
    followed; with `err`, print to standard error."""
    from varuna_core.records.formatting import format_duration
    from varuna_core.records.logs.tail import clean
    from vjob.jobs.programs.code.packages import describe_python
    from vjob.jobs.programs.launchers import is_python
    from vjob.jobs.schedulers import choose as schedulers
    from vjob.jobs.submit.snapshot import describe
    from vjob.jobs.submit.submit import find_warnings

    ids = [job.id for job in record.jobs]
    if plan.queues:
        more = {**more, "queue": "; ".join(f"{name}: {why}" for name, why in plan.queues.items())}
    if as_json:
        facts = {"run": run.name, "folder": str(run.path), "jobs": ids, **more}
        print_object(facts, is_line=True)
    else:
        click.echo(f"submitted {run.name} as job {', '.join(ids)} ({record.scheduler})", err=err)
        code = describe(record.code)
        more = {**more, **({"code": clean(code)} if code else {})}
        word = plan.command[0] if plan.command and not plan.containers else ""
        if is_python(os.path.basename(word)):
            more["python"] = clean(describe_python(shutil.which(word) or word))
        limit_s = record.limits.walltime_s if record.limits is not None else None
        if limit_s and schedulers.get_capabilities(record.scheduler).one_host:
            more["limit"] = f"{format_duration(limit_s)} (cluster.walltime_min)"
        look = {"status": f"vjob status {ids[0]}", "logs": f"vjob logs -f {ids[0]}"}
        for label, text in {**more, "files": str(run.path), **look}.items():
            click.echo(f"  {label:<8}{text}", err=err)
    for warning in find_warnings(run, plan):
        say(f"vjob: {warning}", err=True)
    if follow:
        sys.exit(_follow(run, record, as_json=as_json))


def _follow(run: RunFolder, record: RunRecord, *, as_json: bool) -> int:
    """Print the run's lines to its end, and return its exit code; with `as_json` one object a line.

    On a list of machines Ctrl-C ends the run.
    """
    from varuna_core.facts.remedy import context_of
    from vjob.jobs.monitor.log_lines.print_logs import LineFilter, follow_run
    from vjob.jobs.monitor.rules.remarks import remark_new_files
    from vjob.jobs.monitor.rules.words import render_advice, render_sentence
    from vjob.jobs.runs.new_files import find_new_files

    def say(text: str) -> None:
        click.echo(text, err=as_json and not text.startswith("{"))

    try:
        code = follow_run(run, say, LineFilter(as_json=as_json))
        for found in remark_new_files(find_new_files(run)):
            context = context_of(record.scheduler)
            say(f"-- {render_sentence(found)}; {render_advice(found, context, run.name)}")
        return code
    except KeyboardInterrupt:
        from vjob.jobs.schedulers import choose as schedulers

        if not schedulers.get_capabilities(record.scheduler).remote_shell:
            raise
    from vjob.jobs.runs.cancel import cancel_run

    say(cancel_run(run, now=False, wait_s=CANCEL_S, say=say))
    return 128 + signal.SIGINT


def read_numbers(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    """Check the numbers of an option: `1,2,4`, each 1 or more."""
    if text is None:
        return None
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{text!r}: must be numbers such as 1,2,4")
    return ",".join(words)


@click.command()
@conf_argument
@set_option
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File for the profile; default: parallel.profile of CONF.",
)
@click.option(
    "--sizes",
    callback=read_numbers,
    metavar="1,2,..",
    help="Micro-batch sizes; default: doubled until memory or ten minutes run out.",
)
@click.option(
    "--tensor",
    callback=read_numbers,
    metavar="1,2,..",
    help="Tensor-parallel degrees; default: 1 and the conf's parallel.tensor.",
)
@click.option("--dry-run", is_flag=True, help="Print the scripts; write and submit nothing.")
@click.option("--follow", "-f", is_flag=True, help="Follow the run's lines to its end.")
@json_option
def profile(
    conf: Path,
    overrides: tuple[str, ...],
    output: Path | None,
    sizes: str | None,
    tensor: str | None,
    dry_run: bool,
    follow: bool,
    as_json: bool,
) -> None:
    """Measure what CONF's model costs on its nodes, for the planner.

    A job with CONF's nodes times every kind of layer on every kind of GPU, and the links between
    them. The profile is written to the run folder and to --output; an existing profile is extended.

    \b
    vjob profile conf.yaml --follow
    vjob profile conf.yaml --sizes 1,2,4 --tensor 1,2
    """
    from vjob.jobs.planning.resolve_auto import resolve_unplanned
    from vjob.jobs.submit import submit as submitting

    # A job on all of the conf's nodes, whatever a planner would choose.
    resolved = resolve_unplanned(conf, overrides, require_env=not dry_run)
    target = choose_output(resolved.conf, resolved.path.parent, output)
    words = build_words(target, sizes, tensor)
    if dry_run:
        from vjob.jobs.submit.chain import NO_RUNS

        preview_run(submitting.prepare(resolved, words, for_preview=True), NO_RUNS, as_json)
        return
    ready = submitting.prepare(resolved, words)
    run, record = submitting.submit_prepared(ready, executor=make_executor(resolved))
    print_submitted(
        run, record, ready.plan, {"profile": str(target)}, as_json=as_json, follow=follow
    )


def choose_output(conf: JobConf, base: Path, output: Path | None) -> Path:
    """Return the path of the profile; raise InputError if the ranks cannot see that path, or if
    there is nothing to profile."""
    from vjob.jobs.conf.schema import BUILT_IN
    from vjob.jobs.planning.inputs import name_profile
    from vjob.jobs.submit.build_plan import parse_mount

    if conf.program.kind not in BUILT_IN:
        raise InputError(
            f"vjob profile measures {' and '.join(BUILT_IN)}; a script of your own measures its "
            "model with varuna_core.Profiler and is submitted like any other (docs/profiling.md)"
        )
    target = name_profile(conf, base) if output is None else Path.cwd() / output
    assert target is not None, "check_program refuses a conf without model"
    container = conf.container
    if container.image is not None and container.runtime != "none":
        seen = [Path(parse_mount(mount).target) for mount in container.mounts]
        seen += [Path(conf.log_folder)]
        seen += [] if container.workdir else [Path(conf.workdir or base)]
        if not any(target.is_relative_to(path) for path in seen):
            raise InputError(
                f"--output {target}: that folder is not visible in the container; choose one "
                f"below {', '.join(map(str, seen))}"
            )
    return target


def build_words(target: Path, sizes: str | None, tensor: str | None) -> Sequence[str]:
    """Return further arguments of the built-in program."""
    words = ["--profile", str(target)]
    words += ["--sizes", sizes] if sizes else []
    return words + (["--tensor", tensor] if tensor else [])

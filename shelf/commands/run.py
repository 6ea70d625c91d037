"""The `vjob run` command: run a program given on the command line, without a conf."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vjob.jobs.errors import InputError
from vjob.shelf.commands.arguments import complete_by, json_option, set_option
from vjob.shelf.commands.terminal import say
from vjob.shelf.run.slurm_options import BY_NAME, OPTIONS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from varuna_core.records.record import RunRecord
    from varuna_core.records.runfolder import RunFolder
    from vjob.jobs.planning.resolve_auto import Resolved
    from vjob.shelf.run.slurm_options import Given

END = "--"
IS_COMMAND = f"{__name__}.is_command"
NO_JSON = "--json prints the submitted job and its lines, and cannot be used with --print-conf"


class RunCommand(click.Command):
    """Command whose options end at the program's first word: all further words are the
    program's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            rest = self.make_parser(ctx).parse_args(list(args))[0].get("words") or ()
        except click.NoSuchOption as error:
            raise click.UsageError(explain_unknown(error.option_name), ctx) from None
        own = words[: len(words) - len(rest)] if isinstance(rest, tuple) else words
        ctx.meta[IS_COMMAND] = own[-1:] == [END]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write Slurm's options under a heading of their own."""
        rows: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                option = BY_NAME.get((param.name or "").replace("_", "-"))
                rows[option is not None and option.is_for_slurm].append(record)
        with formatter.section("Options"):
            formatter.write_dl(rows[False])
        with formatter.section("Options that submit the program to Slurm, as for sbatch"):
            formatter.write_dl(rows[True])


def explain_unknown(option: str) -> str:
    """Return advice on an option that `vjob run` does not have, such as one of sbatch's."""
    from vjob.jobs.conf.slurm_words import WORDS, explain_option

    name = option.lstrip("-")
    more = f"for sbatch's --{name}: --set cluster.sbatch.{name}=VALUE"
    if name in WORDS:
        more = f"sbatch's --{name}: {explain_option(name)}"
    return f"No such option: {option} (the program's own options follow its name; {more})"


def complete_file(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete file names, by the shell itself."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def slurm_options(command: Any) -> Any:
    """Add all options of Slurm that correspond to a key of the conf."""
    for option in reversed(OPTIONS):
        names = [f"-{option.short}"] if option.short else []
        given: dict[str, Any] = {"help": option.help}
        if option.name == "partition":
            given["shell_complete"] = complete_by("complete_queue")
        given |= {"metavar": option.metavar} if option.metavar else {"is_flag": True}
        command = click.option(*names, f"--{option.name}", **given)(command)
    return command


@click.command(
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.argument(
    "words",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=complete_file,
    metavar="PROGRAM [ARG]...",
    required=True,
)
@click.option("-m", "is_module", is_flag=True, help="Run PROGRAM as a module, like python -m.")
@click.option("--python", metavar="PATH", help="Python for the program; default: the active one.")
@click.option("-d", "--detach", is_flag=True, help="Do not follow the run.")
@set_option
@click.option("--new-job", is_flag=True, help="Submit a new job, even from a shell inside one.")
@click.option("--print-conf", is_flag=True, help="Print the conf that this command makes.")
@click.option("--dry-run", is_flag=True, help="Print the scripts; write and submit nothing.")
@json_option
@slurm_options
@click.pass_context
def run(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    is_module: bool,
    python: str | None,
    detach: bool,
    overrides: tuple[str, ...],
    new_job: bool,
    print_conf: bool,
    dry_run: bool,
    as_json: bool,
    **options: str | bool | None,
) -> None:
    """Run PROGRAM on this machine, or on Slurm with any of its options, without a conf.

    The output of PROGRAM is shown here, and its exit code becomes that of this command; Ctrl-C ends
    it. A program that is not a Python script runs as a command. All words after PROGRAM are passed
    to it.

    \b
    vjob run train.py --lr 1e-4                    one process on this machine
    vjob run -n 4 train.py                         four ranks, as under torchrun
    vjob run -m package.train --config small.toml
    vjob run -- accelerate launch train.py
    vjob run -N 2 -p gpu --gpus-per-node 4 -t 2h train.py    a Slurm job
    vjob run -N 2 -p gpu --print-conf train.py > conf.yaml   for vjob submit
    """
    from vjob.jobs.schedulers import choose as schedulers
    from vjob.jobs.submit import submit as submitting
    from vjob.jobs.submit.chain import NO_RUNS
    from vjob.shelf.commands.submit import make_executor, preview_run, print_submitted
    from vjob.shelf.run.conf import build_conf, resolve_made
    from vjob.shelf.run.program import read_program

    if print_conf and as_json:
        raise InputError(NO_JSON)
    given = {
        name.replace("_", "-"): value
        for name, value in options.items()
        if value not in (None, False)
    }
    program = read_program(
        words,
        is_module=is_module,
        is_command=ctx.meta[IS_COMMAND] and not is_module,
        base=Path(),
        path=os.environ.get("PATH", os.defpath),
    )
    own = schedulers.choose_auto()
    made = build_conf(
        program,
        given,
        environ=os.environ,
        prefix=sys.prefix,
        python=python,
        inside=own.name if own.can.inside_job else "",
        new_job=new_job,
    )
    resolved = resolve_made(made, overrides, require_env=not dry_run)
    if print_conf:
        click.echo(resolved.text, nl=False)
    elif dry_run:
        preview_run(submitting.prepare(resolved, for_preview=True), NO_RUNS, as_json)
    elif detach:
        _print_notes(resolved, given)
        ready = submitting.prepare(resolved)
        executor = make_executor(resolved)
        found, record = submitting.submit_prepared(ready, executor=executor)
        print_submitted(found, record, ready.plan, {}, as_json=as_json, follow=False)
    else:
        _print_notes(resolved, given)
        say("vjob: Ctrl-C ends the run", err=True)
        sys.exit(_follow(resolved, given, as_json=as_json))


def _print_notes(resolved: Resolved, given: Given) -> None:
    from varuna_core.agent.gpu.accelerator import choose_accelerator, count_visible
    from varuna_core.facts.known import Value
    from vjob.jobs.programs import start
    from vjob.jobs.schedulers import choose as schedulers
    from vjob.shelf.run.conf import list_notes

    counted = count_visible(choose_accelerator(), os.environ)
    num_gpus = counted.value if isinstance(counted, Value) else 0
    has_slurm = not schedulers.get_scheduler("slurm").find_obstacle()
    notes = list_notes(resolved.conf, given, has_slurm=has_slurm, num_gpus=num_gpus)
    launch = start.describe_launch(resolved.conf, resolved.written)
    said = [f"launch {launch}"] if launch.why and launch.name != "python" else []
    for line in (*notes, *said):
        say(f"vjob: {line}", err=True)


def _follow(resolved: Resolved, given: Given, *, as_json: bool) -> int:
    """Submit the run, print where it runs, follow it to its end, and return the exit code."""
    from varuna_core.records.formatting import format_duration
    from varuna_core.records.plan import read_plan
    from vjob.jobs.monitor.log_lines.print_logs import LineFilter
    from vjob.shelf.commands.submit import print_submitted
    from vjob.shelf.run.follow import Screen, start_run

    def announce(run: RunFolder, record: RunRecord) -> None:
        limit_s = record.limits.walltime_s if record.limits is not None else None
        if limit_s and "time" not in given:
            say(f"vjob: the time limit is {format_duration(limit_s)}; -t sets another", err=True)
        plan = read_plan(run.plan)
        assert plan is not None, "the submit has written plan.json"
        print_submitted(run, record, plan, {}, as_json=as_json, follow=False, err=True)

    lines = LineFilter(as_json=True) if as_json else None
    return start_run(resolved, Screen("vjob"), announce, wanted=lines)

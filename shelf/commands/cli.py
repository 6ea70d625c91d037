"""The `vjob` command, and those of its commands that belong to no larger family.

Exit codes: 0 done, 1 failed, 2 your input, 10 and up verdicts, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from varuna_core import __version__
from varuna_core.records.formatting import wrap_text
from varuna_core.records.logs.tail import clean
from vjob.jobs.conf.quantities import DAYS
from vjob.jobs.errors import InputError, VjobError
from vjob.shelf.commands.arguments import (
    Duration,
    complete_by,
    complete_job,
    job_argument,
    json_option,
    print_object,
    sweep_option,
    write_commands,
)
from vjob.shelf.commands.container import container
from vjob.shelf.commands.data import data
from vjob.shelf.commands.elastic import grow, shrink, tend
from vjob.shelf.commands.monitor import logs, shell, stacks, status, watch
from vjob.shelf.commands.plan import plan
from vjob.shelf.commands.report import compare, report
from vjob.shelf.commands.submit import export, profile, submit
from vjob.shelf.commands.terminal import find_width, say
from vjob.shelf.commands.trial import try_

EXAMPLES = """\b
Start here:
  vjob init > conf.yaml        a commented conf
  vjob try conf.yaml           two steps of it on one node: will it run?
  vjob submit conf.yaml        run it: on Slurm, else on this machine
  vjob status last             how it goes
  vjob logs -f last            follow its lines
\b
JOB is a job id, a run's name, `last`, or the path of a run folder.
A time is a number in the unit shown, or 90s, 30m, 2h, 1d12h, 1:30:00.
"""

MEANT = {
    **dict.fromkeys(("check", "validate", "lint"), "submit CONF --dry-run"),
    **dict.fromkeys(("run", "start", "launch", "train", "sbatch"), "submit CONF"),
    **dict.fromkeys(("kill", "stop", "delete", "rm", "scancel"), "cancel JOB"),
    **dict.fromkeys(("ls", "jobs", "ps", "squeue", "sacct"), "list"),
    **dict.fromkeys(("show", "info", "top"), "status JOB"),
    **dict.fromkeys(("log", "tail"), "logs JOB"),
    **dict.fromkeys(("ssh", "exec", "attach"), "shell JOB"),
}
"""Words of other tools for what a command does here."""


class CommandGroup(click.Group):
    """Prints our own errors as text, and lists commands by what they are for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The first sentence of each, whole; click cuts it and knows no groups."""
        wide = max(map(len, self.commands))
        for title, commands in COMMANDS.items():
            write_commands(formatter, title, commands, wide)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands with their first sentence, whole as in the help."""
        found = super().shell_complete(ctx, incomplete)
        for item in found:
            if item.value in self.commands:
                item.help = self.commands[item.value].get_short_help_str(1000)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in MEANT and not ctx.resilient_parsing:
            asked = f"No such command '{args[0]}'. Did you mean 'vjob {MEANT[args[0]]}'?"
            raise click.UsageError(asked, ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            if ctx.params["host"]:
                from vjob.shelf.host.here import run_there

                words = [*ctx._protected_args, *ctx.args]
                sys.exit(run_there(ctx.params["host"], words))
            return super().invoke(ctx)
        except click.UsageError as error:
            if type(error).show is not click.UsageError.show:  # the help of a group
                raise
            # click's own first word takes its place in the line
            shown = wrap_text(f"Error: {error.format_message()}", find_width(sys.stderr))
            raise click.UsageError(shown.removeprefix("Error: "), error.ctx) from None
        except VjobError as error:
            say(f"vjob: {clean(str(error))}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            say("vjob: interrupted; what was submitted goes on, see `vjob list`", err=True)
            sys.exit(130)
        except BrokenPipeError:
            sys.stderr.close()  # `vjob logs | head`: nobody is left to tell
            sys.exit(141)


@click.group(
    cls=CommandGroup, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="vjob")
@click.option(
    "--host",
    metavar="LOGIN",
    envvar="VJOB_HOST",
    help="Run the command on this login node, over your ssh; default: $VJOB_HOST.",
)
def cli(host: str | None) -> None:
    """Train large models with pipeline parallelism on Slurm clusters, mixed or uniform."""


@click.command(name="list")
@click.option("--all", "-a", "show_all", is_flag=True, help="All known runs, not the last 20.")
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
        click.echo(json.dumps(rows, indent=1) if as_json else listing.render_sweep(rows, width))
        return
    rows = listing.list_runs(limit=None if show_all else 20)
    click.echo(json.dumps(rows, indent=1) if as_json else listing.render(rows, width))


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
    help="How long the ranks may take to checkpoint and leave.",
)
@json_option
def cancel(jobs: tuple[str, ...], sweep: str | None, now: bool, wait_s: int, as_json: bool) -> None:
    """Cancel JOBs, or all runs of a sweep; ranks that can are asked to checkpoint first.

    The ranks say that they can by catching SIGUSR1.

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
        raise InputError("give a JOB, several, or --sweep NAME")
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
    help="Runs in which nothing was written for so long.",
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
    help="Also runs whose folder holds checkpoints, results or other files of their ranks.",
)
@click.option("--delete", is_flag=True, help="Remove them; without it they are only listed.")
@click.option("--all", "-a", "show_all", is_flag=True, help="List the runs that stay, too.")
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

    A run goes whole, with its conf, logs and traces; checkpoints outside its folder are never
    touched. What stays: a run that still runs, one whose end is not known, one of another
    user, one that a waiting run comes after. Ctrl-C leaves each run whole or gone.

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
        say(f"vjob: interrupted; {done} removed, the same command goes on", err=True)
        sys.exit(130)
    for name, problem in problems.items():
        if problem:
            say(f"vjob: {Path(name).name}: not all removed: {problem}", err=True)
    if as_json:
        rows = [pruning.as_row(one, delete, problems.get(one.folder, "")) for one in found]
        click.echo(json.dumps(rows, indent=1))
    else:
        say(pruning.conclude(found, num_removed, delete=delete))
    sys.exit(1 if any(problems.values()) else 0)


@click.command()
@job_argument
@click.option(
    "--group",
    metavar="NAME",
    shell_complete=complete_by("complete_group"),
    help="Open JOB to this group of yours.",
)
@click.option("--private", is_flag=True, help="Close it again.")
@click.option("--anyway", is_flag=True, help="Also files in which a secret was found.")
@click.option("--dry-run", is_flag=True, help="Say what would be shared; change nothing.")
@json_option
def share(
    job: str, group: str | None, private: bool, anyway: bool, dry_run: bool, as_json: bool
) -> None:
    """Let a group read JOB with status, logs, report and compare; secrets are kept back.

    What may be seen is a list: confs, records, events, logs, traces. Everything else stays yours:
    values of the environment, scripts, code, pickles. A file in which a secret stands, one of this
    run or one known by its shape (ghp_..., AKIA...), is kept back and named with its line. Files
    that a running JOB goes on writing stay shared, whatever it prints then; a later attempt's are
    shared by another `vjob share`.

    \b
    vjob share last --group ml --dry-run   what they would see
    vjob share last --group ml             they type: vjob status /path/of/the/run
    vjob share last --private
    """
    from vjob.jobs.runs.find import find_run
    from vjob.shelf import share as sharing

    if (group is None) != private:
        raise InputError("give --group NAME to share it, or --private to close it, one of them")
    if private and (anyway or dry_run):
        raise InputError("--anyway and --dry-run go with --group")
    run = find_run(job, Path.cwd())
    if group is None:
        num_files = sharing.close_run(run)
        said: dict[str, Any] = {"run": run.name, "private": num_files}
        text = f"{run.name} is yours alone again: {num_files} files"
    else:
        shared = sharing.share_run(run, group, is_preview=dry_run, anyway=anyway)
        said, text = shared.as_json(), sharing.render_shared(shared, is_preview=dry_run)
    if as_json:
        print_object(said)
    else:
        say(text)


@click.command()
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, path_type=Path),
    help="Translate shell scripts: a file or a folder.",
)
@click.option("--minimal", is_flag=True, help="Only the keys that are needed.")
@click.option(
    "--for",
    "kind",
    type=click.Choice(["script", "gpt", "ddp", "deepspeed", "megatron"]),
    help="A short conf for this kind of program.",
)
def init(source: Path | None, minimal: bool, kind: str | None) -> None:
    """Print a commented conf.yaml, a short one, or the translation of shell scripts.

    A short one names the files that must be there; its queue and GPUs are those that sinfo shows.

    --from takes a _00_conf.sh, job scripts with #SBATCH lines, and scripts with lines of
    run_varuna, torch.distributed.launch, torchrun, deepspeed or Megatron-LM, or their folder. What
    is left out stands above the conf and on standard error, with the reason.

    \b
    vjob init > conf.yaml
    vjob init --minimal > conf.yaml
    vjob init --for ddp > conf.yaml
    vjob init --from _00_conf.sh > conf.yaml
    vjob init --from examples/pretrain_gpt2_distributed.sh > conf.yaml
    vjob init --from Megatron-LM-2/ > conf.yaml
    """
    if (source is not None) + minimal + (kind is not None) > 1:
        raise InputError("give one of --from, --minimal and --for")
    if minimal or kind:
        from vjob.jobs.conf.starters import render_starter
        from vjob.jobs.schedulers.slurm.scheduler import find_starting_nodes

        groups, note = find_starting_nodes()
        click.echo(render_starter(kind or "minimal", groups, note), nl=False)
        return
    if source is None:
        from vjob.jobs.conf.document import render_init

        click.echo(render_init(), nl=False)
        return
    from vjob.shelf.importers.translate import translate_source

    text, notes = translate_source(source, os.environ)
    click.echo(text, nl=False)
    for note in notes:
        say(f"note: {note}", err=True)


@click.command()
def schema() -> None:
    """Print the JSON Schema of conf.yaml, for completion and checks in an editor.

    \b
    vjob schema > conf.schema.json

    With the YAML extension of VS Code, and other editors that run yaml-language-server, a conf
    whose first line is `# yaml-language-server: $schema=conf.schema.json` is checked as you type.
    """
    from vjob.jobs.conf.json_schema import build_schema

    click.echo(json.dumps(build_schema(), indent=1))


@click.command()
@click.argument("conf", required=False, type=click.Path(path_type=Path, exists=True))
@click.option("--gpu", is_flag=True, help="Check GPUs alone, by a job on a node of CONF, or here.")
@json_option
def doctor(conf: Path | None, gpu: bool, as_json: bool) -> None:
    """Check this machine and its Slurm setup, and say what to fix.

    \b
    vjob doctor                      where you submit
    srun -N2 vjob doctor             on two nodes, where the containers are
    vjob doctor --gpu conf.yaml      two ranks on GPUs of one node

    With --gpu: driver, torch, NCCL, a message, a training step, readings.
    """
    from vjob.shelf.doctor import doctor as doctors

    if conf is not None and not gpu:
        raise InputError(f"{conf}: a conf goes with --gpu; `vjob try` tries its program")
    if gpu:
        from vjob.shelf.doctor.gpu_check import check_gpus

        findings = check_gpus(conf, lambda text: None if as_json else say(text, err=True))
    else:
        findings = doctors.examine()
    if as_json:
        click.echo(json.dumps([finding.as_json() for finding in findings], indent=1))
    else:
        say(doctors.render(findings))
    sys.exit(1 if any(finding.status == "fail" for finding in findings) else 0)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    eval "$(vjob completion bash)"        # or put that line in ~/.bashrc
    vjob completion fish > ~/.config/fish/completions/vjob.fish
    """
    from click.shell_completion import get_completion_class

    register_shells()
    kind = get_completion_class(shell)
    if kind is None:
        raise InputError(f"no completion for {shell}")
    click.echo(kind(cli, {}, "vjob", "_VJOB_COMPLETE").source())


@click.command(hidden=True)
def there() -> None:
    """Answer a `vjob --host` of another machine, on standard input and output."""
    from vjob.shelf.host.there import serve

    serve(sys.stdin.buffer, sys.stdout.buffer)


# As `vjob --help` lists them.
COMMANDS: Mapping[str, tuple[click.Command, ...]] = {
    "Run": (try_, submit, cancel),
    "Watch": (status, list_, logs, stacks, shell, watch),
    "Understand": (report, compare, plan, profile),
    "Change the nodes of an elastic run": (grow, shrink, tend),
    "Prepare": (init, schema, doctor, container, data, export, completion),
    "Keep and share": (share, prune),
}
for command in (one for commands in COMMANDS.values() for one in commands):
    cli.add_command(command)
cli.add_command(there)


def register_shells() -> None:
    """Our words in place of click's own."""
    from click.shell_completion import add_completion_class

    from vjob.shelf.commands.completing import BashWords, FishWords, ZshWords

    add_completion_class(BashWords)
    add_completion_class(FishWords)
    add_completion_class(ZshWords)


def main() -> None:
    """Entry point of the `vjob` script."""
    if "_VJOB_COMPLETE" in os.environ:
        register_shells()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("vjob: %(message)s"))
    logging.getLogger("vjob").addHandler(handler)  # not the root's: libraries have their own words
    cli.main(prog_name="vjob")


if __name__ == "__main__":
    main()

"""The `vjob` command: reads words, calls one function, prints, exits. Imports nothing heavy.

Exit codes: 0 done, 1 failed, 2 your input, 10 and up verdicts, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from varuna_core import __version__
from vjob.jobs.commands.arguments import (
    conf_argument,
    job_argument,
    json_option,
    paint_rank,
    set_option,
)
from vjob.jobs.commands.container import container
from vjob.jobs.commands.data import data
from vjob.jobs.commands.elastic import grow, shrink, tend
from vjob.jobs.commands.export import export
from vjob.jobs.commands.plan import plan
from vjob.jobs.commands.profile import profile
from vjob.jobs.commands.report import compare, report
from vjob.jobs.commands.stacks import stacks
from vjob.jobs.commands.status import status
from vjob.jobs.commands.watch import watch
from vjob.jobs.errors import InputError, VjobError

EXAMPLES = """\b
Start here:
  vjob init > conf.yaml        a commented conf
  vjob submit conf.yaml        run it, on Slurm where sbatch is there, else on this machine
  vjob status last             how it goes
  vjob logs -f last            follow its lines
\b
JOB is a job id, a run's name, `last`, or the path of a run folder.
"""


class Group(click.Group):
    """Prints our own errors as text, and lists commands in the order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except VjobError as error:
            click.echo(f"vjob: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("vjob: interrupted; what was submitted goes on, see `vjob list`", err=True)
            sys.exit(130)
        except BrokenPipeError:
            sys.stderr.close()  # `vjob logs | head`: nobody is left to tell
            sys.exit(141)


@click.group(cls=Group, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vjob")
def cli() -> None:
    """Train large models with pipeline parallelism on Slurm clusters, mixed or uniform."""


@cli.command()
@conf_argument
@set_option
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A layout that `vjob plan --write` chose; --set counts over it.",
)
@click.option("--dry-run", is_flag=True, help="Print the scripts; write and submit nothing.")
@click.option("--test-only", is_flag=True, help="Ask Slurm when and where it would start.")
@click.option("--follow", "-f", is_flag=True, help="Follow the run's lines to its end.")
@json_option
def submit(
    conf: Path,
    overrides: tuple[str, ...],
    plan_file: Path | None,
    dry_run: bool,
    test_only: bool,
    follow: bool,
    as_json: bool,
) -> None:
    """Submit CONF: to its list of machines, to Slurm where sbatch is there, else to this machine.

    \b
    vjob submit conf.yaml --dry-run | less
    vjob submit conf.yaml --set cluster.nodes[0].count=4 --follow
    vjob submit conf.yaml --set cluster.machine_list=available_machines.out
    """
    from vjob.jobs.commands.submitted import tell_submitted
    from vjob.jobs.planning.plan_file import describe_promise, read_plan_file
    from vjob.jobs.planning.resolve_auto import resolve_conf
    from vjob.jobs.submit import submit as submitting

    plan = None if plan_file is None else read_plan_file(plan_file, overrides)
    resolved = resolve_conf(conf, overrides, plan=plan, require_env=not dry_run)
    if dry_run:
        from vjob.jobs.submit.preview import render_preview

        click.echo(render_preview(submitting.prepare(resolved, for_preview=True)), nl=False)
        return
    if test_only:
        from vjob.jobs.submit.preview import test_only as ask

        click.echo(ask(submitting.prepare(resolved)))
        return
    run, record = submitting.submit(resolved)
    promise = None if as_json else describe_promise(run)
    more = {"plan": promise} if promise else {}
    tell_submitted(run, record, more, as_json=as_json, follow=follow)


cli.add_command(status)


@cli.command(name="list")
@click.option("--all", "-a", "show_all", is_flag=True, help="All known runs, not the last 20.")
@json_option
def list_(show_all: bool, as_json: bool) -> None:
    """List your runs, the newest last.

    \b
    vjob list
    vjob list --all --json | jq -r '.[].run'
    """
    from vjob.jobs.runs import listing

    rows = listing.list_runs(limit=None if show_all else 20)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    click.echo(json.dumps(rows, indent=1) if as_json else listing.render(rows, width))


@cli.command()
@job_argument
@click.option("--now", is_flag=True, help="Do not ask the ranks to checkpoint first.")
@click.option(
    "--wait",
    "wait_s",
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long the ranks may take to checkpoint and leave.",
)
def cancel(job: str, now: bool, wait_s: int) -> None:
    """Cancel JOB, asking it to checkpoint first (SIGUSR1) where it says that it can.

    \b
    vjob cancel last
    vjob cancel 4711 --wait 300      a large checkpoint on a slow file system
    vjob cancel gpt2-xl --now
    """
    from vjob.jobs.runs.cancel import cancel_run
    from vjob.jobs.runs.find import find_run

    click.echo(cancel_run(find_run(job, Path.cwd()), now=now, wait_s=wait_s, say=click.echo))


@cli.command()
@job_argument
@click.option("--follow", "-f", is_flag=True, help="Go on until the run has ended.")
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="Only this node (repeatable).")
@click.option(
    "--rank", "ranks", multiple=True, type=int, metavar="N", help="Only this rank (repeatable)."
)
@click.option("--grep", "pattern", metavar="REGEX", help="Only lines that match.")
@click.option("--err", "only_err", is_flag=True, help="Only standard error.")
@click.option("--attempt", type=int, help="Which start of the ranks; default: the last.")
@click.option("--lines", "-n", type=int, help="Only the last N lines of each file.")
@click.option("--errors", is_flag=True, help="The first error, with what stands around it.")
@click.option("--raw", is_flag=True, help="File after file, and every rank's lines by themselves.")
def logs(
    job: str,
    follow: bool,
    nodes: tuple[str, ...],
    ranks: tuple[int, ...],
    pattern: str | None,
    only_err: bool,
    attempt: int | None,
    lines: int | None,
    errors: bool,
    raw: bool,
) -> None:
    """Print the lines of JOB's nodes, or of some ranks, in the order of time.

    A line of standard error begins with `n060 err |`, one that many ranks print alike with
    `x64 all ranks |`.

    \b
    vjob logs last --errors
    vjob logs last --rank 3 --grep loss
    vjob logs -f 4711 --node n060
    """
    from vjob.jobs.monitor.log_lines import print_logs as reading
    from vjob.jobs.runs.find import find_run

    run = find_run(job, Path.cwd())
    wanted = reading.Wanted.make(
        nodes=nodes, ranks=ranks, pattern=pattern, only_err=only_err, raw=raw, paint=paint_rank
    )
    if errors:
        reading.print_errors(run, click.echo, wanted, attempt=attempt)
        return
    if follow:
        sys.exit(reading.follow_run(run, click.echo, wanted))
    reading.print_logs(run, click.echo, wanted, attempt=attempt, num_lines=lines)


cli.add_command(grow)
cli.add_command(shrink)
cli.add_command(tend)
cli.add_command(stacks)
cli.add_command(watch)
cli.add_command(plan)
cli.add_command(profile)
cli.add_command(report)
cli.add_command(compare)


@cli.command()
@click.option(
    "--from",
    "shell_conf",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Translate an old _00_conf.sh.",
)
def init(shell_conf: Path | None) -> None:
    """Print a commented conf.yaml, or the translation of an old shell conf.

    \b
    vjob init > conf.yaml
    vjob init --from _00_conf.sh > conf.yaml
    """
    if shell_conf is None:
        from vjob.jobs.conf.document import render_init

        click.echo(render_init(), nl=False)
        return
    from vjob.jobs.conf.loading.shell_import import translate_shell_conf

    text, notes = translate_shell_conf(shell_conf.read_text(encoding="utf-8", errors="replace"))
    click.echo(text, nl=False)
    for note in notes:
        click.echo(f"note: {note}", err=True)


cli.add_command(container)
cli.add_command(data)
cli.add_command(export)


@cli.command()
@json_option
def doctor(as_json: bool) -> None:
    """Look at this machine and its Slurm, and say what to mend before the first job.

    \b
    vjob doctor                      where you submit
    srun -N2 vjob doctor             on two nodes, where the containers are
    """
    from vjob.jobs.doctor import doctor as doctors

    findings = doctors.examine()
    if as_json:
        click.echo(json.dumps([finding.as_json() for finding in findings], indent=1))
    else:
        click.echo(doctors.render(findings))
    sys.exit(1 if any(finding.status == "fail" for finding in findings) else 0)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    eval "$(vjob completion bash)"        # or put that line in ~/.bashrc
    vjob completion fish > ~/.config/fish/completions/vjob.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise InputError(f"no completion for {shell}")
    click.echo(kind(cli, {}, "vjob", "_VJOB_COMPLETE").source())


def main() -> None:
    """Entry point of the `vjob` script."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("vjob: %(message)s"))
    logging.getLogger("vjob").addHandler(handler)  # not the root's: libraries have their own words
    cli.main(prog_name="vjob")


if __name__ == "__main__":
    main()

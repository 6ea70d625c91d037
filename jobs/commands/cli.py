"""The `vjob` command, and those of its commands that belong to no larger family.

Exit codes: 0 done, 1 failed, 2 your input, 10 and up verdicts, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from varuna_core import __version__
from vjob.jobs.commands.arguments import complete_job, json_option, sweep_option
from vjob.jobs.commands.container import container
from vjob.jobs.commands.data import data
from vjob.jobs.commands.elastic import grow, shrink, tend
from vjob.jobs.commands.monitor import logs, stacks, status, watch
from vjob.jobs.commands.plan import plan
from vjob.jobs.commands.report import compare, report
from vjob.jobs.commands.submit import export, profile, submit
from vjob.jobs.commands.trial import try_
from vjob.jobs.errors import InputError, VjobError

EXAMPLES = """\b
Start here:
  vjob init > conf.yaml        a commented conf
  vjob try conf.yaml           two steps of it on one node: will it run?
  vjob submit conf.yaml        run it, on Slurm where sbatch is there, else on this machine
  vjob status last             how it goes
  vjob logs -f last            follow its lines
\b
JOB is a job id, a run's name, `last`, or the path of a run folder.
"""


class CommandGroup(click.Group):
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


@click.group(
    cls=CommandGroup, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="vjob")
def cli() -> None:
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
    vjob list --sweep lr-search                      with the values that were swept
    """
    from vjob.jobs.runs import listing

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if sweep is not None:
        rows = listing.list_sweep(sweep)
        click.echo(json.dumps(rows, indent=1) if as_json else listing.render_sweep(rows, width))
        return
    rows = listing.list_runs(limit=None if show_all else 20)
    click.echo(json.dumps(rows, indent=1) if as_json else listing.render(rows, width))


@click.command()
@click.argument("job", required=False, shell_complete=complete_job)
@sweep_option
@click.option("--now", is_flag=True, help="Do not ask the ranks to checkpoint first.")
@click.option(
    "--wait",
    "wait_s",
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long the ranks may take to checkpoint and leave.",
)
def cancel(job: str | None, sweep: str | None, now: bool, wait_s: int) -> None:
    """Cancel JOB, or all runs of a sweep that go on; asks first to checkpoint (SIGUSR1) where the
    ranks say that they can.

    \b
    vjob cancel last
    vjob cancel 4711 --wait 300      a large checkpoint on a slow file system
    vjob cancel gpt2-xl --now
    vjob cancel --sweep lr-search
    """
    from vjob.jobs.runs.cancel import cancel_run, cancel_runs
    from vjob.jobs.runs.find import find_run
    from vjob.jobs.runs.listing import find_sweep

    if sweep is not None and job is None:
        click.echo(cancel_runs(find_sweep(sweep), now=now, wait_s=wait_s, say=click.echo))
        return
    if job is None or sweep is not None:
        raise InputError("give a JOB or --sweep NAME, one of them")
    click.echo(cancel_run(find_run(job, Path.cwd()), now=now, wait_s=wait_s, say=click.echo))


@click.command()
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, path_type=Path),
    help="Translate shell scripts: a file or a folder.",
)
def init(source: Path | None) -> None:
    """Print a commented conf.yaml, or the translation of shell scripts that start a training.

    --from takes a _00_conf.sh, job scripts with #SBATCH lines, and scripts with lines of
    run_varuna, torch.distributed.launch, torchrun, deepspeed or Megatron-LM, or their folder. What
    is left out stands above the conf and on standard error, with the reason.

    \b
    vjob init > conf.yaml
    vjob init --from _00_conf.sh > conf.yaml
    vjob init --from examples/pretrain_gpt2_distributed.sh > conf.yaml
    vjob init --from Megatron-LM-2/ > conf.yaml
    """
    if source is None:
        from vjob.jobs.conf.document import render_init

        click.echo(render_init(), nl=False)
        return
    from vjob.jobs.conf.foreign.translate import translate_source

    text, notes = translate_source(source, os.environ)
    click.echo(text, nl=False)
    for note in notes:
        click.echo(f"note: {note}", err=True)


@click.command()
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


@click.command()
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


# In the order of use, which is that of `vjob --help`.
for command in (
    try_,
    submit,
    status,
    list_,
    cancel,
    logs,
    grow,
    shrink,
    tend,
    stacks,
    watch,
    plan,
    profile,
    report,
    compare,
    init,
    container,
    data,
    export,
    doctor,
    completion,
):
    cli.add_command(command)


def main() -> None:
    """Entry point of the `vjob` script."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("vjob: %(message)s"))
    logging.getLogger("vjob").addHandler(handler)  # not the root's: libraries have their own words
    cli.main(prog_name="vjob")


if __name__ == "__main__":
    main()

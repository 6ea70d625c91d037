"""The `vjob` command: the table of its commands, and what they have in common.

`vjob --help` and completion print the table without importing a command; a command is imported when
it runs. Exit codes: 0 success, 1 failure, 2 invalid input, 10 and up verdicts, 130 Ctrl-C.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from varuna_core import __version__
from varuna_core.plugins import BuiltIn, Seam
from varuna_core.plugins.installed import warn_once
from varuna_core.records.formatting import wrap_text
from vjob.jobs.errors import VjobError
from vjob.shelf.commands.terminal import find_width, say

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _row(name: str, home: str, text: str) -> BuiltIn:
    """Return a command's row; a test compares `text` with the first sentence of the command's
    help."""
    return BuiltIn(name, text, f"vjob.shelf.commands.{home}")


COMMANDS: Mapping[str, tuple[BuiltIn, ...]] = {
    "Run": (
        _row(
            "run",
            "run:run",
            "Run PROGRAM on this machine, or on Slurm with any of its options, without a conf.",
        ),
        _row(
            "try",
            "trial:try_",
            "Try CONF: two steps of its program on one node, with its data, environment and "
            "container.",
        ),
        _row(
            "submit",
            "submit:submit",
            "Submit CONF: to its list of machines, to Slurm if sbatch is installed, else to "
            "this machine.",
        ),
        _row(
            "cancel",
            "runs:cancel",
            "Cancel JOBs, or all runs of a sweep; ranks that can are asked to checkpoint first.",
        ),
    ),
    "Watch": (
        _row("status", "monitor:status", "Show the status of JOB, or of all your runs."),
        _row("list", "runs:list_", "List your runs, the newest last."),
        _row(
            "logs",
            "monitor:logs",
            "Print the lines of JOB's nodes, or of some ranks, in the order of time.",
        ),
        _row(
            "stacks",
            "monitor:stacks",
            "Show each rank's Python stack; identical stacks are grouped, smallest group first.",
        ),
        _row("guard", "monitor:guard", "Pause or resume what JOB's nodes do about a hang."),
        _row(
            "shell",
            "monitor:shell",
            "Open a shell on a node of JOB, in the ranks' container if it has one, or run "
            "COMMAND there.",
        ),
        _row(
            "watch",
            "monitor:watch",
            "Check JOB regularly until it ends; print each change, and notify you.",
        ),
    ),
    "Understand": (
        _row(
            "report",
            "report:report",
            "Show where JOB's time went, and what to change: one page that opens anywhere.",
        ),
        _row(
            "compare",
            "report:compare",
            "Compare two or more jobs: times, idle parts, memory, losses, confs.",
        ),
        _row(
            "plan",
            "plan:plan",
            "Find the fastest layout of CONF's model on its nodes, and say what is proved.",
        ),
        _row(
            "profile",
            "submit:profile",
            "Measure what CONF's model costs on its nodes, for the planner.",
        ),
    ),
    "Change the nodes of an elastic run": (
        _row("grow", "runs:grow", "Add N nodes to JOB, an elastic run (`morph.enabled`)."),
        _row(
            "shrink",
            "runs:shrink",
            "Remove nodes from JOB, an elastic run, at its next checkpoint.",
        ),
        _row("tend", "runs:tend", "Add idle nodes to JOB and drop slow ones automatically."),
    ),
    "Prepare": (
        _row(
            "init",
            "prepare:init",
            "Print a commented conf.yaml, a short one, or the translation of shell scripts.",
        ),
        _row(
            "schema",
            "prepare:schema",
            "Print the JSON Schema of conf.yaml, for completion and checks in an editor.",
        ),
        _row(
            "doctor",
            "prepare:doctor",
            "Check this machine and its Slurm setup, and say what to fix.",
        ),
        _row(
            "container",
            "container:container",
            "Fetch, list and remove container images.",
        ),
        _row("data", "data:data", "Make training data from text."),
        _row("completion", "prepare:completion", "Print the completion script of SHELL."),
    ),
    "Keep and share": (
        _row(
            "share",
            "runs:share",
            "Let a group read JOB with status, logs, report and compare; secrets are kept back.",
        ),
        _row(
            "prune",
            "runs:prune",
            "List old runs that have ended, or remove them: those of FOLDER, a folder of "
            "logs, or all that `vjob list --all` knows.",
        ),
    ),
}
"""Commands by heading, as `vjob --help` lists them."""
_THERE = BuiltIn(
    "there", "Answer a `vjob --host` of another machine.", "vjob.shelf.host.there:there"
)
"""Row of the command `vjob there`, which is not listed, since only `vjob --host` starts it."""
SEAM = Seam("vjob.commands", [*(row for rows in COMMANDS.values() for row in rows), _THERE])

EXAMPLES = """\b
Start here:
  vjob run train.py            your script, here or (-p QUEUE) on Slurm
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
    **dict.fromkeys(("start", "launch", "train", "srun", "torchrun"), "run PROGRAM"),
    "sbatch": "submit CONF",
    **dict.fromkeys(("kill", "stop", "delete", "rm", "scancel"), "cancel JOB"),
    **dict.fromkeys(("ls", "jobs", "ps", "squeue", "sacct"), "list"),
    **dict.fromkeys(("show", "info", "top"), "status JOB"),
    **dict.fromkeys(("log", "tail"), "logs JOB"),
    **dict.fromkeys(("ssh", "exec", "attach"), "shell JOB"),
}
"""Suggested command for each name that other tools use."""


class CommandGroup(click.Group):
    """Click group that imports one command at a time, and prints vjob's own errors as text."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return SEAM.list_names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = SEAM.load(cmd_name)
        if found is None or isinstance(found, click.Command):
            if found is not None:
                SEAM.remember_help(cmd_name, found.get_short_help_str(limit=1000))
            return found
        warn_once(f"the plug-in {cmd_name} is ignored: it is not a click command")
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command's whole first sentence under its heading, which click itself cannot
        do."""
        titles = {title: [row.name for row in rows] for title, rows in COMMANDS.items()}
        titles["From plug-ins"] = SEAM.list_plugins()
        wide = max(len(name) for names in titles.values() for name in names)
        for title, names in titles.items():
            if names:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(wide), SEAM.get_help(name)) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands, described by their whole first sentence, then options."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=SEAM.get_help(name))
            for name in SEAM.list_names()
            if name.startswith(incomplete) and name != _THERE.name
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_known = args[0] not in MEANT or args[0] in SEAM.list_plugins()
        if not is_known and not ctx.resilient_parsing:
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
            from varuna_core.records.logs.tail import clean

            say(f"vjob: {clean(str(error))}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            say("vjob: interrupted; submitted runs continue, see `vjob list`", err=True)
            sys.exit(130)
        except BrokenPipeError:
            sys.stderr.close()  # `vjob logs | head`: nobody is left to tell
            sys.exit(141)
        except OSError as error:  # a disk that is full, a file server that went away
            from varuna_core.records.files import describe_failure
            from varuna_core.records.logs.tail import clean

            say(f"vjob: {clean(describe_failure(error))}", err=True)
            sys.exit(1)


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


def main() -> None:
    """Entry point of the `vjob` script."""
    if "_VJOB_COMPLETE" in os.environ:
        from vjob.shelf.commands.completing import register_shells

        register_shells()
    gc.set_threshold(200_000)  # Python's 700 doubles the time of a look at 10,240 nodes
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("vjob: %(message)s"))
    logging.getLogger("vjob").addHandler(handler)  # not the root's: libraries have their own words
    cli.main(prog_name="vjob")


if __name__ == "__main__":
    main()

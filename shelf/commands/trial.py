"""The `vjob try` command: run two steps of a conf's program on one node, before the whole run is
submitted."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import click

from vjob.shelf.commands.arguments import (
    Duration,
    complete_by,
    conf_argument,
    json_option,
    set_option,
)
from vjob.shelf.commands.terminal import StatusLine, say


@click.command(name="try")
@conf_argument
@set_option
@click.option(
    "--queue",
    metavar="NAME",
    shell_complete=complete_by("complete_queue"),
    help="Try it on a node of this Slurm partition, such as debug.",
)
@click.option("--here", is_flag=True, help="Try it on this machine even if Slurm is available.")
@click.option(
    "--limit",
    "limit_s",
    default="2m",
    show_default=True,
    metavar="TIME",
    type=Duration(is_open=True),
    help="How long to wait for two steps after the ranks have started.",
)
@click.option("--keep", is_flag=True, help="Keep the run folder of the try even if all is well.")
@json_option
def try_(
    conf: Path,
    overrides: tuple[str, ...],
    queue: str | None,
    here: bool,
    limit_s: float,
    keep: bool,
    as_json: bool,
) -> None:
    """Try CONF: two steps of its program on one node, with its data, environment and container.

    Reports if the program starts and, if not, why and what to do; if it saves, and how much memory
    it takes. Without Slurm the try runs on this machine; else on a node of --queue, or of CONF's
    own first queue.

    \b
    vjob try conf.yaml --queue debug
    vjob try conf.yaml --set train.micro_batch_size=8 --json | jq .healthy
    vjob try conf.yaml --here --limit 10m

    A built-in program runs in all its stages, with a small model if the node has no GPUs. A script
    runs unchanged and is ended after its second step. Checkpoints of the try are saved in a
    separate folder inside CONF's, which is removed. Ctrl-C ends the try.

    Exits 0 if all is well, 1 if a problem was found, 2 if CONF cannot be submitted.
    """
    from vjob.jobs.errors import InputError
    from vjob.jobs.planning.resolve_auto import resolve_conf
    from vjob.jobs.programs.start import refuse_function
    from vjob.shelf.trial.result import render
    from vjob.shelf.trial.run import Try, choose_node

    if queue is not None and here:
        raise InputError("give --queue or --here, not both")
    resolved = resolve_conf(conf, overrides)
    refuse_function(resolved.conf)
    for number in (signal.SIGTERM, signal.SIGHUP):  # it cleans up, as for Ctrl-C
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    line = StatusLine()
    try:
        node = choose_node(resolved.conf, queue, is_here=here)
        result = Try(resolved, limit_s=limit_s, keeps=keep, say=line.show).run(node)
    except KeyboardInterrupt:
        line.clear()
        click.echo("vjob: interrupted", err=True)
        sys.exit(130)
    finally:
        line.clear()
    click.echo(json.dumps(result.as_json(), indent=1)) if as_json else say(render(result))
    sys.exit(0 if result.is_healthy else 1)

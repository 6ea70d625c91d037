"""`vjob export`: the conf as scripts that need no vjob."""

from __future__ import annotations

import os
from pathlib import Path

import click

from vjob.jobs.commands.arguments import conf_argument, set_option
from vjob.jobs.errors import InputError, VjobError


@click.command()
@conf_argument
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--host", "hosts", multiple=True, help="A machine; once for each node, in order.")
@click.option("--elastic", help="MIN:MAX nodes, by torchrun's own rendezvous.")
@click.option("--restarts", default=0, help="How often torchrun starts failed ranks again.")
@set_option
def export(
    conf: Path,
    folder: Path,
    hosts: tuple[str, ...],
    elastic: str | None,
    restarts: int,
    overrides: tuple[str, ...],
) -> None:
    """Write CONF as scripts into FOLDER, for machines without Slurm and without vjob.

    \b
    vjob export conf.yaml byhand                             one machine
    vjob export conf.yaml byhand --host 10.0.0.1 --host 10.0.0.2
    vjob export conf.yaml byhand --host 10.0.0.1 --elastic 1:4 --restarts 3

    FOLDER must be seen under the same path on every machine. The container is yours to start: call
    the scripts inside.
    """
    from varuna_core.agent.bundle import write_program
    from varuna_core.records.files import write_atomic
    from varuna_core.records.runfolder import RunFolder
    from vjob.jobs.conf.schema import BUILT_IN
    from vjob.jobs.planning.resolve_auto import resolve_conf
    from vjob.jobs.programs.shell_export import Machines, build_scripts
    from vjob.jobs.programs.start import read_program_files

    found = resolve_conf(conf, overrides, require_env=False).conf
    machines = Machines(
        hosts=hosts or ("localhost",),
        folder=str(folder.resolve()),
        workdir=found.workdir or str(conf.resolve().parent),
        elastic=None if elastic is None else _parse_range(elastic),
        restarts=restarts,
    )
    files = build_scripts(found, read_program_files(found), machines)
    written = [folder / name for name in files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomic(folder / name, text)
            # A script may hold secrets of `env`: for its owner alone.
            os.chmod(folder / name, 0o700 if name.endswith(".sh") else 0o600)
        if found.program.kind in BUILT_IN:
            write_program(RunFolder(folder).program)
            written.append(RunFolder(folder).program)
    except OSError as error:
        raise VjobError(f"{folder} cannot be written: {error.strerror}") from None
    for path in written:
        click.echo(path)


def _parse_range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not (low.isdecimal() and colon and high.isdecimal()):
        raise InputError(f"--elastic {text}: give the fewest and the most nodes, as 1:4")
    return int(low), int(high)

"""`vjob profile`: a job like any other whose ranks measure the model instead of training it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vjob.jobs.commands.arguments import conf_argument, json_option, set_option
from vjob.jobs.errors import InputError

if TYPE_CHECKING:
    from vjob.jobs.conf.schema import JobConf


def read_numbers(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    """`1,2,4`, each 1 or more."""
    if text is None:
        return None
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{text!r}: want numbers such as 1,2,4")
    return ",".join(words)


@click.command()
@conf_argument
@set_option
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the profile goes; default: parallel.profile of CONF.",
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
    them. The profile goes to the run folder and to --output; one that is there is extended.

    \b
    vjob profile conf.yaml --follow
    vjob profile conf.yaml --sizes 1,2,4 --tensor 1,2
    """
    from vjob.jobs.commands.submitted import tell_submitted
    from vjob.jobs.planning.resolve_auto import resolve_unplanned
    from vjob.jobs.submit import submit as submitting

    # A job on all of the conf's nodes, whatever a planner would choose.
    resolved = resolve_unplanned(conf, overrides, require_env=not dry_run)
    target = choose_output(resolved.conf, resolved.path.parent, output)
    words = build_words(target, sizes, tensor)
    if dry_run:
        from vjob.jobs.submit.preview import render_preview

        ready = submitting.prepare(resolved, words, for_preview=True)
        click.echo(render_preview(ready), nl=False)
        return
    run, record = submitting.submit(resolved, words)
    tell_submitted(run, record, {"profile": str(target)}, as_json=as_json, follow=follow)


def choose_output(conf: JobConf, base: Path, output: Path | None) -> Path:
    """Absolute; refused where the ranks would not see it, or cannot profile at all."""
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
                f"--output {target}: the container does not see that folder; choose one below "
                f"{', '.join(map(str, seen))}"
            )
    return target


def build_words(target: Path, sizes: str | None, tensor: str | None) -> Sequence[str]:
    """What the built-in program is told besides its settings."""
    words = ["--profile", str(target)]
    words += ["--sizes", sizes] if sizes else []
    return words + (["--tensor", tensor] if tensor else [])

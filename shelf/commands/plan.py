"""The `vjob plan` command: find the fastest layout of a conf's model on its nodes, with a proof."""

from __future__ import annotations

from pathlib import Path

import click

from vjob.jobs.conf.quantities import HOURS
from vjob.jobs.errors import InputError
from vjob.shelf.commands.arguments import (
    Duration,
    OutputFile,
    complete_by,
    json_option,
    print_object,
    set_option,
)
from vjob.shelf.commands.terminal import say


def read_prices(
    ctx: click.Context, param: click.Parameter, words: tuple[str, ...]
) -> dict[str, float]:
    """Parse prices such as `a100=12.5,a10=3`; the option may be repeated."""
    found = {}
    for word in ",".join(words).split(",") if words else ():
        name, equals, text = word.partition("=")
        try:
            price = float(text)
        except ValueError:
            price = -1.0
        if not name or not equals or not 0 <= price < float("inf"):
            raise click.BadParameter(f"{word!r}: must be TYPE=PRICE, such as a100=12.5")
        found[name.strip()] = price
    return found


@click.command()
@click.argument(
    "conf", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@set_option
@click.option(
    "--profile",
    "profile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Profile from `vjob profile`; default: profiles/<model>.profile.json next to CONF, "
    "else an estimate.",
)
@click.option("--estimate", is_flag=True, help="Estimate even if there is a profile.")
@click.option(
    "--link",
    "link_gb_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB/S",
    help="Bandwidth of a node's link to the others, if not measured.  [of an estimate: 12.5]",
)
@click.option(
    "--top",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of plans to show.",
)
@click.option(
    "--limit",
    "limit_s",
    default=60.0,
    show_default=True,
    type=Duration(),
    metavar="SECONDS",
    help="Time to search.",
)
@click.option("--from-slurm", is_flag=True, help="Use the nodes that sinfo shows, not the conf's.")
@click.option(
    "--queue",
    metavar="NAME",
    shell_complete=complete_by("complete_queue"),
    help="With --from-slurm: only nodes of this Slurm partition.",
)
@click.option(
    "--prices",
    multiple=True,
    callback=read_prices,
    metavar="TYPE=PRICE,..",
    help="Price per node-hour by GPU type; overrides the conf.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    help="Choose the fastest plan whose whole run costs no more.",
)
@click.option(
    "--deadline",
    "deadline_h",
    type=Duration(HOURS, is_open=True),
    metavar="HOURS",
    help="Choose the cheapest plan whose whole run takes no longer.",
)
@click.option(
    "--write",
    "written",
    type=OutputFile(),
    metavar="FILE",
    help="Write the plan for `vjob submit CONF --plan FILE`.",
)
@json_option
def plan(
    conf: Path | None,
    overrides: tuple[str, ...],
    profile: Path | None,
    estimate: bool,
    link_gb_s: float | None,
    top: int,
    limit_s: float,
    from_slurm: bool,
    queue: str | None,
    prices: dict[str, float],
    budget: float | None,
    deadline_h: float | None,
    written: Path | None,
    as_json: bool,
) -> None:
    """Find the fastest layout of CONF's model on its nodes, and say what is proved.

    Keys of parallel that CONF writes are kept; those that it leaves out or sets to auto are free.

    \b
    vjob plan conf.yaml
    vjob plan conf.yaml --from-slurm --prices a100=12.5,a10=3.2
    vjob plan conf.yaml --budget 500 --write plan.json
    vjob submit conf.yaml --plan plan.json
    """
    from vjob.jobs.planning.inputs import explain_errors

    if conf is None:
        raise click.UsageError("no conf is given: vjob plan conf.yaml")
    with explain_errors():
        from vjob.jobs.planning.answer import build_json, find_answer
        from vjob.jobs.planning.answer_text import render_answer
        from vjob.jobs.planning.plan_file import write_plan_file
        from vjob.jobs.planning.question import PlanOptions, read_question

        if queue is not None and not from_slurm:
            raise InputError("--queue needs --from-slurm")
        options = PlanOptions(
            overrides=overrides,
            profile=profile,
            is_estimated=estimate,
            link_gb_s=link_gb_s,
            prices=prices,
            from_slurm=from_slurm,
            queue=queue,
        )
        read, question = read_question(conf, options)
        answer = find_answer(
            question, limit_s=limit_s, top=top, budget=budget, deadline_h=deadline_h
        )
        if as_json:
            print_object(build_json(answer))
        else:
            say(render_answer(answer).rstrip("\n"))
        if written is not None:
            why = f"{question.basis}; predicted {answer.best.step_s:.4g} s a step"
            write_plan_file(written, conf.resolve(), read, answer.best, why)
            click.echo(f"wrote {written}: vjob submit {conf} --plan {written}", err=as_json)

"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from vjob.jobs.conf.quantities import SECONDS, Unit, parse_moment, parse_quantity

JSON_FORMAT = 1
"""Format number of the objects that commands print with --json; it stays the same if keys are
added."""


def print_object(facts: Mapping[str, Any], *, is_line: bool = False) -> None:
    """Print one object for scripts; with `is_line` on one line, for output of an object a line."""
    indent = None if is_line else 1
    click.echo(json.dumps({"format": JSON_FORMAT, **facts}, indent=indent))


def print_list(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows as a JSON list of objects, each with the version of the format."""
    click.echo(json.dumps([{"format": JSON_FORMAT, **row} for row in rows], indent=1))


class OutputFile(click.Path):
    """Path of an output file; refused if its folder does not exist or cannot be written."""

    def __init__(self, *, may_be_folder: bool = False) -> None:
        super().__init__(dir_okay=may_be_folder, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"{path}: the folder {path.parent} does not exist", param, ctx)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            self.fail(f"{path}: you may not write to the folder {path.parent}", param, ctx)
        return path


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 alone
    """Parameter type of a duration: a number in a default unit, or `90s`, `2h`, `1d12h`,
    `1:30:00`."""

    name = "time"

    def __init__(
        self,
        unit: Unit = SECONDS,
        *,
        least: float = 0.0,
        is_open: bool = False,
        whole: bool = False,
    ) -> None:
        """`whole` rounds up to an integer; `is_open` refuses the value `least` itself."""
        self.unit, self.least, self.is_open, self.whole = unit, least, is_open, whole

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = value if isinstance(value, (int, float)) else parse_quantity(value, self.unit)
        if found is None:
            forms = f"{self.unit.name}, or a time such as 90s, 30m, 2h, 1d12h or 1:30:00"
            self.fail(f"{value!r}: give a number of {forms}", param, ctx)
        least = Fraction(str(self.least))
        if found < least or (self.is_open and found == least):
            bound = f"{'more than' if self.is_open else 'at least'} {self.least:g}"
            self.fail(f"{value!r}: give {bound} {self.unit.name}", param, ctx)
        return math.ceil(found) if self.whole else float(found)


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 alone
    """Parameter type of a time, as seconds since 1970: `14:30`, `2026-11-23 14:30`, or `2h`
    (ago)."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = parse_moment(str(value), datetime.now().astimezone())
        if found is None:
            said = "such as 14:30, 2026-11-23 14:30, or 90s, 30m, 2h (ago)"
            self.fail(f"{value!r}: give a time {said}", param, ctx)
        return found.timestamp()


class OrderedGroup(click.Group):
    """Command group that lists its commands in the order of use, each with the whole first sentence
    of its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(limit=1000)) for name, one in self.commands.items()]
            )


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete JOB with the names, runs and job ids in the index."""
    from vjob.jobs.runs.listing import known_jobs

    return [word for word in known_jobs() if word.startswith(incomplete)]


def complete_by(name: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a completion function that imports `completing.NAME` only when a shell asks for
    words."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        from vjob.shelf.commands import completing

        found: list[str] = getattr(completing, name)(ctx, param, incomplete)
        return found

    return complete


def complete_sweep(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a sweep."""
    from vjob.jobs.schedulers.run_index import list_sweeps

    return [word for word in list_sweeps() if word.startswith(incomplete)]


job_argument = click.argument("job", shell_complete=complete_job)
conf_argument = click.argument("conf", type=click.Path(exists=True, path_type=Path))
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    shell_complete=complete_by("complete_set"),
    metavar="KEY=VALUE",
    help="Override one key, such as --set parallel.pipeline=4.",
)
after_option = click.option(
    "--after",
    multiple=True,
    metavar="JOB",
    shell_complete=complete_job,
    help="Start once JOB has ended well; never if it has not.",
)
after_any_option = click.option(
    "--after-any",
    multiple=True,
    metavar="JOB",
    shell_complete=complete_job,
    help="Start once JOB has ended in any way.",
)
sweep_option = click.option(
    "--sweep",
    metavar="NAME",
    shell_complete=complete_sweep,
    help="The runs of this sweep.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
port_option = click.option(
    "--port",
    type=click.IntRange(1, 65535),
    metavar="N",
    help="Port of 127.0.0.1 to serve at; default: a free one.",
)


def check_port(port: int | None, is_served: bool) -> None:
    """Raise UsageError if a port is given but no page is served."""
    if port is not None and not is_served:
        raise click.UsageError("--port goes with --web")

"""Render the output of `vjob submit --dry-run` and `--test-only`, which write nothing."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from varuna_core.records.formatting import align_columns
from varuna_core.records.logs.tail import clean
from varuna_core.records.plan import render_plan
from varuna_core.records.secrets import REDACTED, redact_string
from vjob.jobs.conf.loading.site import Origin, list_origins
from vjob.jobs.conf.redact import redact_value
from vjob.jobs.errors import InputError
from vjob.jobs.runs.listing import shorten_keys
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.job import StartEstimate
from vjob.jobs.submit.chain import NO_RUNS, AfterRuns
from vjob.jobs.submit.scripts import render_node
from vjob.jobs.submit.snapshot import describe
from vjob.jobs.submit.submit import Prepared

if TYPE_CHECKING:
    from vjob.jobs.submit.sweep import Sweep

MOST_FILES, MOST_LINES, MOST_WORDS, MOST_ITEMS = 8, 2000, 400, 100
"""Most files of a run, lines of a file, words of a line, and items of a comma-separated list that
are shown; the JSON has everything."""


def render_preview(ready: Prepared, after: AfterRuns = NO_RUNS) -> str:
    """Render each file that a submit would write below a shell comment with its name; of a very
    long file, only the first and last lines."""
    parts = list(_list_scripts(ready).items())
    parts += [(name, _comment(redact_string(text))) for name, text in ready.files.items()]
    lines = json.dumps(_break_lines(_describe_plan(ready)), indent=1)
    parts.append((ready.run.plan.name, _comment(lines)))
    head = f"# Nothing is written or submitted. The run folder would be {ready.run.path}\n"
    code = describe(ready.snapshot.build_record())
    head += f"# Its code: {clean(code)}\n" if code else ""
    head += f"# Its launch: {clean(str(ready.launch))}\n" if ready.launch.why else ""
    head += "".join(f"# {note}\n" for note in ready.notes)
    for run in after.runs:
        how = "has ended well" if run in after.succeeded else "has ended"
        head += f"# It would start once {run.name} {how}\n"
    left_out = ready.resolved.site.left_out
    head += _comment(render_origins(_list_origins(ready), str(ready.resolved.path), left_out))
    shown = [f"\n# ---- {name}\n{_shorten(text)}" for name, text in parts]
    return head + "".join(_keep_ends(shown, MOST_FILES, "\n# ... {} more files ...\n"))


def _shorten(text: str) -> str:
    """Shorten a text, dropping the middle of long lists and of a long text."""
    lines = _keep_ends(text.splitlines(keepends=True), MOST_LINES, "# ... {} more lines ...\n")
    return "".join(
        word if word.count(",") < MOST_ITEMS else ",".join(_keep_ends(word.split(","), 8))
        for line in lines
        for word in _keep_ends(re.split(r"(\s+)", line), MOST_WORDS)
    )


def _keep_ends(items: list[str], most: int, left_out: str = " ... {} more ... ") -> list[str]:
    """Return at most `most` items: the first, a note on how many are omitted, and the last."""
    if len(items) <= most:
        return items
    last = most // 4
    number = len(items) - most + 1
    return [*items[: most - 1 - last], left_out.format(number), *items[-last:]]


def _list_origins(ready: Prepared) -> dict[str, Origin]:
    resolved = ready.resolved
    return list_origins(resolved.conf, resolved.lines, resolved.site, resolved.queues)


def render_origins(origins: Mapping[str, Origin], conf: str, left_out: Collection[str]) -> str:
    """Render the values that a conf does not write, a paragraph for each origin."""
    found: dict[str, list[str]] = {}
    for key, origin in origins.items():
        place = origin.where.rpartition(":")[0] if origin.source in ("site", "user") else ""
        head = f"{origin.source} ({place})" if place else origin.source
        value = origin.where if origin.source == "chosen" else origin.value
        found.setdefault(head, []).append(f"{key} {value}")
    if left_out:
        found["defaults of the site that do not fit, so they are not used"] = sorted(left_out)
    lines = [f"Values that {conf} does not set:"] if found else []
    for head in sorted(found, key=lambda head: head == "default"):
        text = clean(f"{head}: {', '.join(found[head])}")
        lines += textwrap.wrap(
            text,
            78,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    return "\n".join(lines)


def describe_preview(ready: Prepared, after: AfterRuns = NO_RUNS) -> dict[str, Any]:
    """Return the preview for scripts: texts by file name, and the plan as an object."""
    others = {name: redact_string(text) for name, text in ready.files.items()}
    return {
        "run": ready.run.name,
        "folder": str(ready.run.path),
        "scheduler": ready.plan.scheduler,
        "code": clean(describe(ready.snapshot.build_record())),
        "launch": clean(str(ready.launch)),
        "after": [{"run": run.name, "must_succeed": run in after.succeeded} for run in after.runs],
        "origins": {
            key: {"value": origin.value, "from": origin.source, "where": origin.where}
            for key, origin in _list_origins(ready).items()
        },
        "files": _list_scripts(ready) | others,
        "plan": _describe_plan(ready),
    }


def describe_sweep_preview(sweep: Sweep, after: AfterRuns = NO_RUNS) -> dict[str, Any]:
    """Return the runs of a sweep, with the whole preview of the first."""
    runs = [
        {
            "run": run.ready.run.name,
            "swept": redact_value(run.values),
            "ranks": run.ready.plan.world,
            "nodes": run.ready.plan.num_nodes,
        }
        for run in sweep.runs
    ]
    first = describe_preview(sweep.runs[0].ready, after)
    return {"sweep": sweep.name, "at_most": sweep.at_most, "runs": runs, "first": first}


def _list_scripts(ready: Prepared) -> dict[str, str]:
    """Return the scripts by file name, without secrets."""
    batch = ready.scripts.batch.items()
    shown = replace(ready.conf, setup=tuple(redact_string(line) for line in ready.conf.setup))
    return {
        **{ready.run.batch_script(group).name: text for group, text in batch},
        ready.run.node_script.name: render_node(shown, ready.plan, ready.run),
    }


def _describe_plan(ready: Prepared) -> dict[str, Any]:
    """Return the content of plan.json without secrets."""
    value: dict[str, Any] = redact_value(json.loads(render_plan(ready.plan)))
    value["env"].update(dict.fromkeys(ready.conf.pass_env, REDACTED))
    return value


def render_sweep_preview(sweep: Sweep, after: AfterRuns = NO_RUNS) -> str:
    """Render the runs of a sweep, and the files of the first."""
    short = shorten_keys(sweep.keys)
    cells = [("RUN", *short.values(), "RANKS", "NODES")]
    for run in sweep.runs:
        shown = redact_value(run.values)
        values = (clean(str(shown.get(key, "-"))) for key in sweep.keys)
        plan = run.ready.plan
        cells.append((run.ready.run.name, *values, str(plan.world), str(plan.num_nodes)))
    limit = f", {sweep.at_most} at most at once" if sweep.at_most is not None else ""
    count = f"{len(sweep.runs)} run{'s' if len(sweep.runs) > 1 else ''}"
    how = "" if sweep.array_obstacle else ", one array"
    head = [f"Sweep {sweep.name}: {count}{limit}{how}", *align_columns(cells), "The first one:"]
    return _comment("\n".join(head)) + render_preview(sweep.runs[0].ready, after)


def _break_lines(value: Any) -> Any:
    """Convert texts of several lines, such as a container's scripts, to lists of lines."""
    if isinstance(value, dict):
        return {key: _break_lines(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_break_lines(item) for item in value]
    return value.splitlines() if isinstance(value, str) and "\n" in value.rstrip() else value


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.splitlines())


def test_only(ready: Prepared) -> dict[str | None, StartEstimate]:
    """Return the scheduler's estimate for each job, by its group; None if one job holds all."""
    scheduler = schedulers.get_scheduler(ready.plan.scheduler)
    if not scheduler.can.test_only:
        raise InputError(
            f"--test-only asks a scheduler such as Slurm, and this conf is for {scheduler.title}, "
            "which gives no estimate; use --dry-run"
        )
    batch = ready.scripts.batch
    return {group: scheduler.test(ready.run, group, text) for group, text in batch.items()}


def describe_estimates(
    ready: Prepared, estimates: Mapping[str | None, StartEstimate]
) -> dict[str, Any]:
    """Return the start estimates in machine-readable form; of a scheduler's message that is not
    recognized, only the text."""
    jobs = [{"group": group, **one.as_json()} for group, one in estimates.items()]
    return {"run": ready.run.name, "jobs": jobs}

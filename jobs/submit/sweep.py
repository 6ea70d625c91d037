"""Sweeps: one conf submitted many times, with other values of some of its keys.

    --sweep a=1,2 --sweep b=x,y     a=1 b=x   a=1 b=y   a=2 b=x   a=2 b=y
    --sweep-file rows.csv           a run a row; with --sweep each row with each of the above

All runs are resolved before the first is submitted, and all are cancelled if one is refused. Runs
that request the same from a scheduler form one array, of which at most N run at once. Other runs
are separate jobs, limited to N at once by a chain: each run waits for the end of the run N before
it, which works on every scheduler without a watching process.
"""

from __future__ import annotations

import csv
import io
import itertools
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_core.facts.cause import Actor
from varuna_core.records import record as records
from varuna_core.records.files import write_atomic
from varuna_core.records.formatting import align_columns
from varuna_core.records.logs.tail import clean
from varuna_core.records.record import ArrayPlace, RunRecord, append_event, write_record
from varuna_core.records.runfolder import RunFolder, make_run_folder
from vjob.jobs.conf.loading.load import read_text
from vjob.jobs.conf.redact import redact_value, show
from vjob.jobs.errors import ConfError, InputError, RefusedError, UncertainError, VjobError
from vjob.jobs.interrupts import defer_interrupts
from vjob.jobs.planning.plan_file import PlanFile
from vjob.jobs.planning.resolve_auto import Resolved, resolve_conf
from vjob.jobs.programs.start import refuse_function
from vjob.jobs.runs.find import is_over, view_run
from vjob.jobs.runs.listing import shorten_keys
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.job import After
from vjob.jobs.submit.array import find_obstacle, submit_elements
from vjob.jobs.submit.chain import NO_RUNS, AfterRuns, resolve_after
from vjob.jobs.submit.scripts import ArrayShape, render_array, render_array_header
from vjob.jobs.submit.snapshot import Snapshot, take_snapshot
from vjob.jobs.submit.submit import (
    Prepared,
    cancel_submitted,
    explain_write,
    make_run_id,
    prepare,
    submit_prepared,
    tell_notes,
    write_run,
)

if TYPE_CHECKING:
    from vjob.jobs.schedulers.script_executor import ScriptExecutor

log = logging.getLogger(__name__)
MOST_RUNS = 1000
MOST_NAMED = 3
"""The most runs named in a problem."""
MOST_SHOWN = 20
"""The most rows in the table of submitted runs."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_JOB = re.compile(r"last|L?\d+")
_OUTPUT = re.compile(r"--?(save|out|output|ckpt|checkpoint)([-_]?(dir|folder|path|file))?")
"""Options by which programs usually take a path to write to."""

Values = Mapping[str, str]
"""The value of each swept key, as written."""


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of a sweep, ready to be submitted."""

    values: Values
    ready: Prepared


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep, ready to be submitted."""

    name: str
    runs: tuple[SweepRun, ...]
    at_most: int | None
    """The most runs at the same time; None for all."""
    array_obstacle: str = ""
    """Why the runs are separate jobs; empty if they are one array."""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key for run in self.runs for key in run.values))


Submitted = tuple[RunFolder, RunRecord]
Taken = dict[tuple[object, ...], Snapshot]
Progress = Callable[[int, int], None]
"""Function called with the number of finished runs, and of all runs."""


def no_progress(done: int, total: int) -> None:
    """Show no progress: the default of `progress`."""


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Parse `train.steps=10,20`: a key, and its values as `--set` takes them."""
    key, equals, rest = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--sweep {text}: must be key=value,value, such as train.steps=10,20")
    values = split_values(rest, text)
    for value in values:
        if not value:
            raise InputError(f"--sweep {text}: a value is empty; write null or '' for nothing")
        if values.count(value) > 1:
            raise InputError(f"--sweep {text}: {value} occurs twice")
    return key.strip(), values


def split_values(text: str, shown: str) -> list[str]:
    """Split a text at commas outside brackets and quotes."""
    parts, start, depth, at = [], 0, 0, 0
    while at < len(text):
        char = text[at]
        if char in "[{":
            depth += 1
        elif char in "]}":
            depth = max(0, depth - 1)
        elif char in "'\"" and _begins_word(text[start:at]):
            at = _find_quote_end(text, at)
            if at < 0:
                raise InputError(f"--sweep {shown}: a quote is not closed")
        elif char == "," and not depth:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    if depth:
        raise InputError(f"--sweep {shown}: a bracket is not closed")
    return [part.strip() for part in [*parts, text[start:]]]


def _begins_word(before: str) -> bool:
    """Return True if a quote here would begin a quoted text; in `it's` it is a letter."""
    return before.rstrip()[-1:] in ("", ",", "[", "{", ":")


def _find_quote_end(text: str, start: int) -> int:
    """Return the end of the quoted text that begins at `start`, by YAML's rules, or -1."""
    quote, at = text[start], start + 1
    while at < len(text):
        if quote == '"' and text[at] == "\\":
            at += 1
        elif text[at] == quote:
            if quote == '"' or text[at + 1 : at + 2] != quote:
                return at
            at += 1
        at += 1
    return -1


def parse_rows(text: str, source: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file, keyed by the names in its first line; an empty cell keeps the
    conf's value."""
    try:
        read = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise InputError(f"{source}: this is not CSV: {error}") from None
    rows = [row for row in read if any(cell.strip() for cell in row)]
    keys = [key.strip() for key in rows[0]] if rows else []
    if len(rows) < 2:
        raise InputError(f"{source}: must have a line of keys, then a line of values for each run")
    for key in keys:
        if not key or keys.count(key) > 1:
            problem = f"{key} occurs twice" if key else "a key is empty"
            raise InputError(f"{source}: the first line must hold the keys: {problem}")
    found = []
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(keys):
            raise InputError(
                f"{source}: row {number} has {len(row)} values for {len(keys)} keys; a value with "
                'a comma in it needs double quotes: "[0.9, 0.95]"'
            )
        cells = zip(keys, (cell.strip() for cell in row), strict=True)
        found.append({key: cell for key, cell in cells if cell})
    return found


def build_rows(
    sweeps: Sequence[str], rows: Sequence[Values] = (), overrides: Sequence[str] = ()
) -> list[Values]:
    """Return the values of each run: each row with each combination, in the given order."""
    parsed = [parse_sweep(text) for text in sweeps]
    given = [key for key, _ in parsed]
    given += list(dict.fromkeys(key for row in rows for key in row))
    given += list(dict.fromkeys(text.partition("=")[0].strip() for text in overrides))
    for key in given:
        if given.count(key) > 1:
            raise InputError(f"{key} is given twice; use one of --sweep, --sweep-file and --set")
    count = len(rows) or 1
    for _, values in parsed:
        count *= len(values)
    if count > MOST_RUNS:
        raise InputError(
            f"this sweep has {count} runs, more than the {MOST_RUNS} allowed; a cluster may "
            "allow fewer (MaxSubmitJobs of `sacctmgr show assoc user=$USER`): split the sweep"
        )
    columns = [[(key, value) for value in values] for key, values in parsed]
    return [
        {**row, **dict(chosen)} for row in (rows or [{}]) for chosen in itertools.product(*columns)
    ]


def find_rows(
    sweeps: Sequence[str], file: Path | None, overrides: Sequence[str] = ()
) -> list[Values]:
    """Return the values of each run, from a file and from options."""
    rows = [] if file is None else parse_rows(read_text(file, str(file)), str(file))
    return build_rows(sweeps, rows, overrides)


def prepare_sweep(
    conf: Path,
    rows: Sequence[Values],
    *,
    overrides: Sequence[str] = (),
    name: str | None = None,
    plan: PlanFile | None = None,
    at_most: int | None = None,
    for_preview: bool = False,
    progress: Progress = no_progress,
) -> Sweep:
    """Resolve and prepare every run; raise InputError with the problems of all."""
    if name is not None:
        check_name(name)
    problems: dict[str, list[Values]] = {}
    runs: list[SweepRun] = []
    taken: Taken = {}
    for number, row in enumerate(rows):
        progress(number, len(rows))
        words = [*overrides, *(f"{key}={value}" for key, value in row.items())]
        try:
            resolved = resolve_conf(conf, words, plan=plan, require_env=not for_preview)
            refuse_function(resolved.conf)
            name = name or make_run_id(resolved.conf.name, time.localtime())
            run_id = f"{name}-{len(runs) + 1}"
            snapshot = take_snapshot_once(resolved, taken)
            ready = prepare(resolved, run_id=run_id, for_preview=for_preview, snapshot=snapshot)
            runs.append(SweepRun(values=row, ready=ready))
        except ConfError as error:
            for problem in error.problems:
                problems.setdefault(str(problem), []).append(row)
        except InputError as error:
            problems.setdefault(str(error), []).append(row)
    progress(len(rows), len(rows))
    if problems:
        raise InputError(_explain_problems(problems, len(rows)))
    assert name is not None, "a sweep needs at least one run"
    if at_most is not None and len({run.ready.plan.scheduler for run in runs}) > 1:
        raise InputError("--at-most needs runs of one scheduler, as they wait for each other")
    if index.find_sweep(name):
        raise InputError(f"a sweep {name} already exists: give another --sweep-name")
    _warn_of_shared_outputs([list_outputs(run.ready.conf.program.args) for run in runs])
    _warn_of_shared_checkpoints([run.ready.conf.train.checkpoint.folder for run in runs])
    sweep = Sweep(name=name, runs=tuple(runs), at_most=at_most)
    return replace(sweep, array_obstacle=find_array_obstacle(sweep))


def list_outputs(args: Sequence[str]) -> dict[str, str]:
    """Return the path that each option of a program names to write to, as far as the option's name
    says so; a path with a reference may differ between runs, and is omitted."""
    words = [part for word in args for part in word.split("=", 1)]
    pairs = itertools.pairwise(words)
    return {
        option: path
        for option, path in pairs
        if _OUTPUT.fullmatch(option) and not re.match(r"-|[0-9]*$|.*\$\{", path)
    }


def _warn_of_shared_outputs(outputs: Sequence[Mapping[str, str]]) -> None:
    shared = set.intersection(*(set(each.items()) for each in outputs))
    for option, path in sorted(shared) if len(outputs) > 1 else ():
        log.warning(
            "all runs of the sweep have %s %s and may overwrite each other's files: put "
            "${run.name} in the path to give each run its own",
            *(option, path),
        )


def _warn_of_shared_checkpoints(folders: Sequence[str | None]) -> None:
    if len(folders) > 1 and len(set(folders)) == 1 and folders[0] is not None:
        log.warning(
            "all runs of the sweep have train.checkpoint.folder %s and may load each other's "
            "checkpoints: let it refer to a key that is swept, as in ckpt/${train.optimizer.lr} "
            "or ckpt/${env.LR}",
            folders[0],
        )


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or _JOB.fullmatch(name):
        raise InputError(
            f"--sweep-name {name}: letters, digits, -, _ and ., starting with a letter or "
            "digit, at most 64; `last` and job ids are no names"
        )


def _explain_problems(problems: Mapping[str, Sequence[Values]], num_rows: int) -> str:
    """Explain each problem once, with the values of the affected runs."""
    bad = {describe_values(row) for rows in problems.values() for row in rows}
    lines = [f"{len(bad)} of {num_rows} runs have problems; nothing was submitted"]
    for problem, rows in problems.items():
        if len(rows) == num_rows > 1:
            who = "all runs"
        else:
            more = f" and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else ""
            who = "; ".join(map(describe_values, rows[:MOST_NAMED])) + more
        text = problem.replace("\n", "\n    ")
        lines += [f"  {who}:", f"    {text}"]
    return "\n".join(lines)


def describe_values(values: Values) -> str:
    """Format values as `train.steps=10 parallel.pipeline=2`, without secrets."""
    return " ".join(f"{key}={show(key, value)}" for key, value in values.items()) or "(the conf's)"


def find_array_obstacle(sweep: Sweep) -> str:
    """Return why these runs cannot be one array; empty if they can."""
    if len(sweep.runs) == 1:
        return "the sweep has one run"
    readies = [run.ready for run in sweep.runs]
    obstacles = (find_obstacle(ready) for ready in readies)
    if obstacle := next(filter(None, obstacles), ""):
        return obstacle
    if len({(ready.plan.scheduler, ready.run.path.parent) for ready in readies}) > 1:
        return "scheduler or log_folder differ between the sweep's runs"
    shape = build_shape(sweep)
    headers = {
        tuple(render_array_header(one.conf, one.plan, readies[0].run, shape, sweep.name))
        for one in readies
    }
    if len(headers) > 1:
        return "the sweep's runs ask for different nodes, queues, times or options"
    there = next((ready.run.path for ready in readies if os.path.lexists(ready.run.path)), None)
    return "" if there is None else f"{there} already exists"


def build_shape(sweep: Sweep) -> ArrayShape:
    return ArrayShape(name=sweep.name, size=len(sweep.runs), first=1, at_most=sweep.at_most)


def submit_sweep(
    sweep: Sweep,
    *,
    executor: ScriptExecutor | None = None,
    after: AfterRuns = NO_RUNS,
    progress: Progress = no_progress,
) -> list[Submitted]:
    """Submit the runs, as one array if possible; see `describe_how`.

    Otherwise they are submitted one by one, and after a refusal the earlier ones are taken back.
    Ctrl-C waits for the run being submitted; runs reported to `progress` stay submitted.
    """
    waits = resolve_after(after, sweep.runs[0].ready.plan.scheduler)
    if not sweep.array_obstacle:
        try:
            return _submit_array(sweep, after, waits, executor, progress)
        except RefusedError as error:
            log.warning("%s; its runs are submitted as jobs of their own", error)
    return _submit_one_by_one(sweep, after, executor, progress)


def _submit_array(
    sweep: Sweep,
    after: AfterRuns,
    waits: After,
    executor: ScriptExecutor | None,
    progress: Progress,
) -> list[Submitted]:
    """Submit all runs as one array; after a refusal, remove everything."""
    from vjob.jobs.schedulers.script_executor import ScriptExecutor  # submitit: only a submit pays

    runs, written, sources = list[RunFolder](), list[RunRecord](), dict[Path, Path]()
    try:
        for number, one in enumerate(sweep.runs, start=1):
            ready = share_code(one.ready, sources)
            run = make_run_folder(ready.run.path)
            runs.append(run)
            if run.path != ready.run.path:
                raise RefusedError(f"{ready.run.path} was made by somebody else", [])
            place = ArrayPlace(name=sweep.name, index=number)
            swept = redact_value(one.values)
            written.append(
                write_run(ready, run, after=after, array=place, sweep=sweep.name, swept=swept)
            )
            sources.setdefault(ready.snapshot.root, run.code)
        first = sweep.runs[0].ready
        script = runs[0].path / "array.sh"
        text = render_array(first.conf, first.plan, runs[0], build_shape(sweep), sweep.name)
        write_atomic(script, text)
    except BaseException as error:
        _remove(runs)
        if isinstance(error, OSError):
            raise VjobError(explain_write(sweep.runs[0].ready.run.path, error)) from None
        raise
    with defer_interrupts():
        try:
            executor = executor or ScriptExecutor(runs[0].path)
            done = submit_elements(runs, written, script, waits, executor)
        except RefusedError:
            _remove(runs)
            raise
        progress(len(done), len(done))
    return list(zip(runs, done, strict=True))


def _remove(runs: Sequence[RunFolder]) -> None:
    for run in runs:
        shutil.rmtree(run.path, ignore_errors=True)


def _submit_one_by_one(
    sweep: Sweep, after: AfterRuns, executor: ScriptExecutor | None, progress: Progress
) -> list[Submitted]:
    tell_notes(sweep.runs[0].ready)
    done: list[Submitted] = []
    sources: dict[Path, Path] = {}
    for number, run in enumerate(sweep.runs):
        before = [done[place][0] for place in find_before(number, sweep.at_most)]
        waits = AfterRuns(succeeded=after.succeeded, ended=(*after.ended, *before))
        ready = share_code(run.ready, sources)
        with defer_interrupts():
            try:
                submitted = submit_prepared(
                    ready,
                    after=waits,
                    executor=executor,
                    sweep=sweep.name,
                    swept=redact_value(run.values),
                )
            except VjobError as error:
                raise _take_back(done, sweep, run, error) from None
            done.append(submitted)
            sources.setdefault(ready.snapshot.root, submitted[0].code)
            progress(len(done), len(sweep.runs))
    return done


def take_snapshot_once(resolved: Resolved, taken: Taken) -> Snapshot:
    """Return the code that a run keeps, computed once for runs of the same program."""
    conf = resolved.conf
    program = replace(conf.program, args=())
    key = (resolved.path, program, conf.container, conf.workdir, conf.log_folder)
    if key not in taken:
        taken[key] = take_snapshot(conf, resolved.path.parent, os.environ)
    return taken[key]


def share_code(ready: Prepared, sources: Mapping[Path, Path]) -> Prepared:
    """Return the run with the code of the sweep's first one, so that later edits have no effect."""
    snapshot = ready.snapshot
    source = sources.get(snapshot.root)
    if snapshot.tree is None or source is None:
        return ready
    tree = replace(snapshot.tree, root=source)
    return replace(ready, snapshot=replace(snapshot, tree=tree))


def find_before(number: int, at_most: int | None) -> list[int]:
    """Return the number of the run to wait for, as a list; empty for the first `at_most` runs."""
    return [] if at_most is None or number < at_most else [number - at_most]


def build_json(submitted: Sequence[Submitted]) -> list[dict[str, Any]]:
    return [
        {
            "run": run.name,
            "folder": str(run.path),
            "jobs": [job.id for job in record.jobs],
            "swept": dict(record.swept),
        }
        for run, record in submitted
    ]


def render_submitted(sweep: Sweep, submitted: Sequence[Submitted]) -> str:
    """Render the submitted runs as a table, a long one shortened, and what to type next."""
    cells = [("JOB", "RUN", *shorten_keys(sweep.keys).values())]
    for run, record in submitted:
        jobs = ",".join(job.id for job in record.jobs)
        cells.append((jobs, run.name, *(clean(record.swept.get(key, "-")) for key in sweep.keys)))
    lines = align_columns(cells)
    if len(lines) > MOST_SHOWN + 1:
        half = MOST_SHOWN // 2
        more = f"... {len(lines) - 1 - 2 * half} more"
        lines = [*lines[: half + 1], more, *lines[-half:]]
    count = f"{len(submitted)} run{'s' if len(submitted) > 1 else ''}"
    head = f"submitted {sweep.name}, {count} ({describe_how(sweep, submitted)})"
    verbs = ("list --sweep", "compare", "cancel --sweep")
    lines += [f"vjob {verb} {sweep.name}" for verb in verbs]
    return "\n  ".join([head, *lines])


def describe_how(sweep: Sweep, submitted: Sequence[Submitted]) -> str:
    """Return the scheduler, and that the runs are one array, or why they are not."""
    _, record = submitted[0]
    if record.array is not None:
        return f"{record.scheduler}, one array: {record.jobs[0].id.partition('_')[0]}"
    has_arrays = schedulers.get_capabilities(record.scheduler).arrays
    obstacle = sweep.array_obstacle if has_arrays and len(submitted) > 1 else ""
    return f"{record.scheduler}, jobs of their own: {obstacle}" if obstacle else record.scheduler


def _take_back(
    done: Sequence[Submitted], sweep: Sweep, run: SweepRun, error: VjobError
) -> VjobError:
    """Cancel submitted runs, the last first; return the error, with what was not cancelled."""
    what = f"run {len(done) + 1} of {len(sweep.runs)} ({describe_values(run.values)})"
    kept = []
    for folder, record in reversed(done):
        if cancel_submitted(schedulers.get_scheduler(record.scheduler, folder), record):
            if not is_over(view_run(folder)):  # else there was nothing left to cancel
                kept += [job.id for job in record.jobs]
            continue
        message = f"withdrawn, because {what} of the sweep was refused"
        write_record(folder, records.refuse(record, message, actor=Actor.VJOB))
        append_event(folder.vjob_events, "refused", message=message)
    lines = [f"{what} was not submitted: {error}"]
    if isinstance(error, UncertainError):
        lines[0] = f"it is not known if {what} was submitted: {error}"
    if done:
        lines.append(f"  The {len(done)} runs before it were withdrawn; no run is left.")
    if kept:
        ids = ", ".join(kept)
        lines[-1] = (
            f"  Earlier runs were withdrawn, except these jobs, still to be cancelled: {ids}"
        )
    kinds = (UncertainError, InputError, VjobError)
    return next(kind for kind in kinds if isinstance(error, kind))("\n".join(lines))

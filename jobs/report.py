"""`vjob report`: finds the job's files and hands them to `reports`, which only this imports."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from jobs.errors import InputError, VjobError
from jobs.runs import find_run, view_run
from varuna_core.records import record as records
from varuna_core.records.runfolder import RunFolder

Say = Callable[[str], object]


def find_folder(job: str, here: Path) -> tuple[Path, RunFolder | None]:
    """JOB as everywhere, or the path of any folder of logs, or of one log."""
    try:
        run = find_run(job, here)
    except InputError:
        path = here / Path(job).expanduser()
        if path.exists():
            return path, None
        raise
    return run.path, run


def is_partial(run: RunFolder | None) -> bool:
    """Whether more may still come; what nobody knows is taken as ended."""
    if run is None:
        return False
    with contextlib.suppress(VjobError):
        return view_run(run).record.state == records.SUBMITTED
    return False


def write_report(
    job: str,
    here: Path,
    say: Say,
    *,
    text: bool,
    csv: Path | None,
    parquet: Path | None,
    trace: Path | None,
) -> None:
    """What was asked for; the text where nothing was."""
    folder, run = find_folder(job, here)
    check_libraries()
    from reports import analysis, export, findings, load, perfetto
    from reports import text as texts
    from reports.sources import SourceError

    try:
        found = load.load_job(folder)
    except SourceError as error:
        raise InputError(str(error)) from None
    analysed = analysis.analyse(found)
    try:
        for target, write in ((csv, export.write_csv), (parquet, export.write_parquet)):
            if target is not None:
                written = write(found, analysed, target)
                say(f"wrote {len(written)} tables to {target}")
        if trace is not None:
            count = perfetto.write_perfetto(found, analysed, trace)
            steps = sorted({f"{step.step}" for step in analysed.steps}, key=int)
            said = f" of steps {', '.join(steps)}: open it in ui.perfetto.dev" if steps else ""
            say(f"wrote {trace}, {count} slices{said}")
    except OSError as error:
        raise VjobError(f"{error.filename or folder}: {error.strerror}") from None
    if text or (csv, parquet, trace) == (None, None, None):
        sentences = findings.find_all(found, analysed)
        partial = is_partial(run)
        say(texts.render_text(found, analysed, sentences, is_partial=partial).rstrip("\n"))


def check_libraries() -> None:
    for name in ("numpy", "pandas", "pyarrow"):
        if importlib.util.find_spec(name) is None:
            raise VjobError(
                f"reports need {name}, which is not installed: pip install 'vjob[report]'"
            )

"""`vjob compare`: finds the jobs' files and hands them to `reports`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jobs.errors import InputError
from jobs.report import Say, check_libraries, find_folder
from varuna_core.records.runfolder import RunFolder


def compare_jobs(names: Sequence[str], here: Path, say: Say, *, as_json: bool) -> None:
    """The table, or the same as JSON."""
    if len(names) < 2:
        raise InputError("compare wants two jobs or more, such as `vjob compare 4711 last`")
    check_libraries([])
    from reports import analysis, compare, load
    from reports.sources import SourceError

    found = []
    for name in names:
        folder, run = find_folder(name, here)
        try:
            job = load.load_job(folder)
        except SourceError as error:
            raise InputError(str(error)) from None
        found.append(
            compare.Compared(
                label=job.sources.name,
                job=job,
                analysis=analysis.analyse(job),
                conf=_read_conf(run),
            )
        )
    compared = compare.compare(found)
    if as_json:
        say(json.dumps(compare.as_json(compared), indent=1))
    else:
        say(compare.render_comparison(compared).rstrip("\n"))


def _read_conf(run: RunFolder | None) -> Mapping[str, Any]:
    if run is None:
        return {}
    try:
        conf = yaml.safe_load(run.resolved.read_text())
    except (OSError, UnicodeError, yaml.YAMLError):
        return {}
    return conf if isinstance(conf, dict) else {}

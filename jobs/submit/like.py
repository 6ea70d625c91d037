"""Submit a job again (`vjob submit --like JOB`), with its resolved conf and its code.

The resolved conf has JOB's overrides and its planned layout, but no secrets, which must be given
again. If JOB has no copy of its code, the present code runs, with a warning if it differs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from varuna_core.records.files import read_text
from varuna_core.records.plan import read_plan
from varuna_core.records.record import RunRecord, format_commit, read_record
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.secrets import REDACTED
from vjob.jobs.conf.parse import PROGRAM_KEYS
from vjob.jobs.conf.write import dump_yaml
from vjob.jobs.conf.yaml_tree import join_key
from vjob.jobs.errors import InputError
from vjob.jobs.planning.plan_file import PlanFile
from vjob.jobs.planning.resolve_auto import Resolved, resolve_conf
from vjob.jobs.runs.resolved import read_resolved
from vjob.jobs.submit.snapshot import COPIED_KINDS, Snapshot, read_snapshot, take_snapshot


@dataclass(frozen=True, kw_only=True)
class Again:
    """A run prepared to be submitted again."""

    resolved: Resolved
    snapshot: Snapshot
    warning: str = ""
    """How the present code differs from the code that JOB ran; empty if the run kept its code."""


def resolve_like(
    run: RunFolder,
    overrides: Sequence[str] = (),
    *,
    plan: PlanFile | None = None,
    require_env: bool = True,
) -> Again:
    """Read JOB's conf with `overrides` applied; raise InputError if something is missing."""
    record = read_record(run)
    plain = read_resolved(run)
    if record is None or not plain:
        raise InputError(f"{run.path} has no record.json and resolved.yaml that can be read")
    given = [text.partition("=")[0].strip() for text in overrides]
    _fill_secrets(run, plain, overrides, given)
    asked = _read_program(plain)
    kept = None
    others = {"program", "program.snapshot", f"program.{asked[0]}"} if asked is not None else set()
    if asked is not None and others.isdisjoint(given):
        kept = read_snapshot(run, record, moves_workdir=plain["program"].get("snapshot") != "auto")
    is_path = asked is not None and asked[0] not in ("module", "command")
    if asked is not None and kept is not None and is_path:
        # The conf's checks look for the program: the user's own may be there no more.
        plain["program"][asked[0]] = str(run.code / kept.program)
    resolved = resolve_conf(
        Path(record.conf), overrides, plan=plan, text=dump_yaml(plain), require_env=require_env
    )
    if asked is not None and kept is not None and is_path:
        conf = resolved.conf
        conf = replace(conf, program=replace(conf.program, path=asked[1]))
        resolved = replace(resolved, chosen=replace(resolved.chosen, conf=conf))
    resolved = _keep_plan(run, resolved) if not overrides and plan is None else resolved
    resolved = replace(resolved, text=_read_conf(run) or resolved.text)
    if kept is not None:
        return Again(resolved=resolved, snapshot=kept)
    today = take_snapshot(resolved.conf, resolved.path.parent, os.environ)
    warning = ""
    if resolved.conf.program.kind in COPIED_KINDS:
        warning = explain_difference(run, record, today)
    return Again(resolved=resolved, snapshot=today, warning=warning)


def _read_conf(run: RunFolder) -> str:
    """Return the conf's own text without secrets; empty if it cannot be read."""
    try:
        return read_text(run.conf)
    except (OSError, ValueError):
        return ""


def _read_program(plain: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the program's key and file; None for a program without a file."""
    program = plain.get("program")
    kinds = [kind for kind in PROGRAM_KEYS if isinstance(program, dict) and kind in program]
    return (kinds[0], str(plain["program"][kinds[0]])) if kinds else None


def _fill_secrets(
    run: RunFolder, plain: dict[str, Any], overrides: Sequence[str], given: Sequence[str]
) -> None:
    """Drop variables that `pass_env` now names; raise InputError if another secret is missing."""
    passed = set(plain.get("pass_env") or ())
    for text in overrides:
        key, _, value = text.partition("=")
        if key.strip() == "pass_env":
            passed = set(map(str, yaml.safe_load(value) or ()))
    env = plain.get("env") or {}
    for name in [name for name in env if name in passed and env[name] == REDACTED]:
        del env[name]
    missing = [key for key in find_hidden(plain) if not any(_is_at(key, one) for one in given)]
    if not missing:
        return
    words = " ".join(f"--set {key}=..." for key in missing)
    names = [key.removeprefix("env.") for key in missing if key.startswith("env.")]
    or_passed = f", or from this shell: --set pass_env=[{', '.join(names)}]" if names else ""
    raise InputError(f"{run.name} has no stored secrets: give them again: {words}{or_passed}")


def find_hidden(value: Any, key: str = "") -> Iterator[str]:
    """Yield the keys of values whose secrets were left out."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from find_hidden(inner, join_key(key, str(name)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from find_hidden(inner, f"{key}[{number}]")
    elif isinstance(value, str) and REDACTED in value:
        yield key


def _is_at(key: str, place: str) -> bool:
    """Return True if a key is the given place in the conf, or a key below that place."""
    return key == place or key.startswith((f"{place}.", f"{place}["))


def _keep_plan(run: RunFolder, resolved: Resolved) -> Resolved:
    """Add the other results of JOB's planning (reason, prediction, layouts), which still hold since
    nothing has changed."""
    plan = read_plan(run.plan)
    if plan is None:
        return resolved
    chosen = replace(
        resolved.chosen,
        why=plan.planned or resolved.chosen.why,
        prediction=plan.prediction,
        layouts=plan.layouts,
        layout_steps=plan.layout_steps,
    )
    return replace(resolved, chosen=chosen)


def explain_difference(run: RunFolder, record: RunRecord, today: Snapshot) -> str:
    """Explain how the present code differs from a run's; empty if it is the same."""
    then, now = record.code, today.build_record()
    if then is None or not then.commit:
        return f"the code of {run.name} was not kept: today's code is used"
    commit = format_commit(now) or "in no commit"
    if now is None or now.commit != then.commit:
        return f"{run.name} ran {format_commit(then)}, but the code is now {commit}"
    if _read_change(run) != _drop_head(today.state.diff):
        return f"{run.name} ran {format_commit(then)}, and files have changed since"
    return ""


def _read_change(run: RunFolder) -> str:
    try:
        return _drop_head(read_text(run.code_diff, "replace"))
    except OSError:
        return ""


def _drop_head(text: str) -> str:
    """Return the patch in a code.diff, without its lines on branch and untracked files."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("# "))

"""Remove keys that do not fit the rest of the conf, and list missing files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from varuna_core.records.secrets import REDACTED, is_secret, redact_string
from vjob.jobs.conf.loading.check import check_conf, find_missing_paths
from vjob.jobs.conf.loading.load import parse_conf_lines
from vjob.jobs.conf.references import spell_value
from vjob.jobs.errors import ConfError, Problem
from vjob.shelf.importers.draft import Draft, render_draft


def leave_out_misfits(draft: Draft) -> None:
    """Remove the keys that checks refuse, noting each check's message, until the conf passes."""
    for _ in range(40):
        problems = _find_problems(draft)
        if not any(_drop(draft, problem) for problem in problems):  # checked again after each
            for problem in problems:
                draft.note(f"to correct: {problem}", is_first=True)
            return


def _find_problems(draft: Draft) -> list[Problem]:
    text = render_draft(draft)
    try:
        conf, lines = parse_conf_lines(text, "conf.yaml", Path("/"), (), draft.environ)
    except ConfError as error:
        return list(error.problems)
    return check_conf(conf, lines, require_paths=False)


def _drop(draft: Draft, problem: Problem) -> bool:
    """Remove the key that a problem names; return False if there is none to remove."""
    group = re.match(r"cluster\.nodes\[(\d+)\]\.(\w+)", problem.key)
    if group is not None and int(group[1]) < len(draft.groups):
        value = draft.groups[int(group[1])].pop(group[2], None)
        if value is None:
            return False
        key = group[0]
    else:
        key = re.sub(r"\[.*", "", problem.key)
        while key and key not in draft.values:
            key = key.rpartition(".")[0]
        if not key and problem.key.startswith("model."):  # it needs all its numbers, or none
            key = next((name for name in draft.values if name.startswith("model.")), "")
        if not key or key in ("program", "name"):
            return False
        value = draft.values.pop(key)
        _spell_out(draft, key, value)
        if key in ("env", "cluster.sbatch") and isinstance(value, dict):
            inner = problem.key.removeprefix(f"{key}.")
            rest = {name: item for name, item in value.items() if name != inner}
            value = value.get(inner)
            if rest and value is not None:
                draft.values[key] = rest
            key = f"{key}.{inner}"
    shown = REDACTED if is_secret(key) else value
    draft.note(f"{key} = {shown} is left out: {problem.message}", is_first=True)
    return True


def _spell_out(draft: Draft, key: str, value: Any) -> None:
    """Replace references to a removed key with its value, so the program's words stay the same."""
    program = draft.values.get("program", {})
    program["args"] = [
        word.replace(f"${{{key}}}", spell_value(value)) for word in program.get("args", [])
    ]


def find_absent(draft: Draft, base: Path | None) -> list[str]:
    """List the files that a submit from the conf's folder would not find."""
    if base is None:
        return []
    environ = {**os.environ, **draft.environ}
    try:
        conf = parse_conf_lines(render_draft(draft), "conf.yaml", base, (), environ)[0]
    except ConfError:
        return []
    return [
        f"not here: {key} = {redact_string(str(value))} {message}"
        for key, value, message in find_missing_paths(conf, base)
    ]

"""Find the scripts of a folder that a user starts.

A script that another one names is started or sourced by it: `_03_submit.sh` names the job scripts,
and these name the conf and the script of a node. Bash follows the scripts from there, so bash
decides which job script runs and which value a variable gets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from varuna_core.records.files import read_bytes
from vjob.jobs.errors import InputError
from vjob.shelf.importers.bash.recording import MAX_FILE, SUFFIXES


def find_entries(path: Path) -> list[Path]:
    """Return the scripts to begin with, those that start most others first; for a file, itself."""
    if not path.is_dir():
        return [path]
    texts = {
        file.name: read_bytes(file, MAX_FILE).decode("utf-8-sig", "replace")
        for file in sorted(path.iterdir())
        if file.suffix in SUFFIXES and file.is_file() and file.stat().st_size <= MAX_FILE
    }
    if not texts:
        raise InputError(f"{path} has no shell scripts ({', '.join(SUFFIXES)})")
    named = {name: _list_named(name, texts) for name in texts}
    entries = [name for name in texts if not any(name in others for others in named.values())]
    # Scripts that name each other in a ring have no first.
    return [path / name for name in sorted(entries or texts, key=lambda one: -len(named[one]))]


def _list_named(name: str, texts: Mapping[str, str]) -> set[str]:
    """Return the other scripts that a script names outside of comments."""
    text = re.sub(r"(?m)^\s*#.*$", "", texts[name])
    return {
        other for other in texts
        if other != name and re.search(rf"(?<![\w.-]){re.escape(other)}(?![\w-])", text)
    }  # fmt: skip

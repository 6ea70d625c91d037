"""The program that words of a command line start.

train.py --lr 1          {script: train.py, args: [--lr, 1]}
./train.sh               the same, where the file is executable and begins with #!
job.sh                   {command: [bash, job.sh]}
-m pkg.train             {module: pkg.train}
-- accelerate launch ..  {command: [accelerate, launch, ..]}, as without -- where PATH has it
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vjob.jobs.errors import InputError

CONFS = (".yaml", ".yml")
PYTHON = ".py"
SHELL = (".sh", ".bash", ".slurm", ".sbatch")


def read_program(
    words: Sequence[str], *, is_module: bool, is_command: bool, base: Path, path: str
) -> dict[str, Any]:
    """Return the section `program`; raise InputError if the words start nothing. `path` is PATH."""
    if not words or not words[0]:
        raise InputError(
            "no program is given: vjob run train.py, vjob run -m package, vjob run -- command"
        )
    first, *args = words
    kept = [keep_text(word) for word in args]
    if is_module:
        return {"module": first, **({"args": kept} if kept else {})}
    file = base / first
    if is_command and not (file.is_file() and file.suffix == PYTHON):  # perhaps only on the nodes
        return {"command": [keep_text(first), *kept]}
    if file.is_dir():
        raise InputError(f"{first} is a folder: give a script in it, or a package with -m")
    if not file.is_file():
        if shutil.which(first, path=path):
            return {"command": [keep_text(first), *kept]}
        raise InputError(f"{first}: no such file here, and no command of that name on PATH")
    if file.suffix in CONFS:
        raise InputError(f"{first} is a conf, not a program: vjob submit {first}")
    is_script = file.suffix == PYTHON or (_read_begin(file) == b"#!" and os.access(file, os.X_OK))
    if is_script:
        return {"script": first, **({"args": kept} if kept else {})}
    if os.access(file, os.X_OK):
        return {"command": [keep_text(first if os.sep in first else f"./{first}"), *kept]}
    if file.suffix in SHELL:
        return {"command": ["bash", keep_text(first), *kept]}
    raise InputError(
        f"{first} is neither a Python script (.py) nor executable: give the program that runs "
        f"it, such as vjob run -- python {first}"
    )


def name_program(program: Mapping[str, Any]) -> str:
    """Return a name for the run and its folder."""
    if "module" in program:
        return name_run(str(program["module"]).replace(".", "-"))
    if "script" in program:
        return name_run(str(program["script"]))
    words = program["command"]
    files = [word for word in words if os.path.splitext(word)[1] in (PYTHON, *SHELL)]
    return name_run(files[0] if files else words[0])


def name_run(script: str) -> str:
    """Return a folder name derived from the script's name."""
    stem = os.path.splitext(os.path.basename(script))[0]
    name = re.sub(r"[^A-Za-z0-9_-]", "-", stem).strip("-_")[:50]
    return f"run-{name}".strip("-") if not name or re.fullmatch(r"last|L?\d+", name) else name


def _read_begin(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(2)
    except OSError:
        return b""


def keep_text(text: str) -> str:
    """Escape a text so that it reaches ranks unchanged: `${` would be a reference to a key."""
    return text.replace("${", "$${")

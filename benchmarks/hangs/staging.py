"""What staging here and on the lab have in common: programs, the page, and what a row is of."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.gpu import find_commit
from varuna_core.facts.hang import Hang

SCRIPTS = {
    "lightning": "with_lightning.py",
    "trainer": "with_trainer.py",
    "accelerate": "with_accelerate.py",
}
STAGED = "staged.json"


def find_python(kind: str) -> str:
    """The interpreter that has the frameworks (`make .venv/.installed-recipes`), or this one."""
    return str(Path(sys.prefix, "recipes/bin/python")) if kind in SCRIPTS else sys.executable


def note_staging(folder: Path) -> None:
    """Keep the commit and the load of the last five minutes beside a run that is over."""
    noted = {"commit": find_commit(), "load": round(os.getloadavg()[1], 1)}
    (folder / STAGED).write_text(json.dumps(noted))


def describe_staging(folder: Path) -> str:
    try:
        noted = json.loads((folder / STAGED).read_text())
    except FileNotFoundError:
        return "not kept"
    return f"{noted['commit']}, {noted['load']}"


def format_wait(hang: Hang | None) -> str:
    """Seconds from the last step to what is done about it."""
    return "" if hang is None else f"{hang.seen_at - hang.since:.0f}"


def write_part(heading: str, rows: list[str]) -> None:
    """Replace one part of the page, and leave the other as its own command made it."""
    page = RESULTS / "hangs.md"
    begin, _, rest = page.read_text().partition(f"\n## {heading}\n")
    _, mark, after = rest.partition("\n## ")
    page.write_text(begin + "\n".join(["", f"## {heading}", "", *rows, ""]) + mark + after)

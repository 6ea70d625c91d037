"""Runs a script as Python would, with the timeline that a run of vjob puts into engines.

`traced.py train.py [ARGUMENT ...]`: each rank writes trace/<rank>.jsonl in the current folder.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

folder = Path("trace").absolute()
folder.mkdir(exist_ok=True)
os.environ["VJOB_TRACE"] = str(folder / f"{os.environ['RANK']}.jsonl")

from varuna_core.trace import hook  # noqa: E402  # the trace is read as it is imported

hook.start()
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")

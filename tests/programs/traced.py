"""Trace a script's timeline without vjob: python -m varuna_core.trace run train.py [ARGUMENT ...]

Under torchrun: `torchrun --nproc-per-node 4 -m varuna_core.trace run train.py`. Each rank writes
the file <rank>.jsonl in the folder `trace`, or in the folder that VJOB_TRACE_FOLDER names; `vjob
report .` draws the timeline from the folder `trace`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from varuna_core import trace
from varuna_core.records.files import PRIVATE_FOLDER
from varuna_core.trace import hook

FOLDER = "VJOB_TRACE_FOLDER"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m varuna_core.trace", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script as python would, with a timeline")
    run.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    words = parser.parse_args()
    if not os.environ.get("VJOB_TRACE"):
        folder = Path(os.environ.get(FOLDER, "trace")).absolute()
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        trace.write_to(str(folder / f"{os.environ.get('RANK', '0')}.jsonl"))
    hook.start()
    sys.argv = [words.script, *words.arguments]
    if words.is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(words.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(words.script).absolute().parent)
        runpy.run_path(words.script, run_name="__main__")


if __name__ == "__main__":
    main()

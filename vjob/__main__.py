"""`python -m vjob` is the `vjob` command; so is `python .../vjob/__main__.py`.

Started by its path it imports the vjob that it belongs to, installed or not, whatever the current
folder and PYTHONPATH hold: that is how vjob starts itself (`vjob.jobs.process.build_own_command`).
`-m MODULE` in front runs another module of vjob or varuna_core so.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    if sys.argv[1:2] == ["-m"]:
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    from vjob.shelf.commands.cli import main as run_cli

    run_cli()


if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parent.parent)

if __name__ == "__main__":
    main()

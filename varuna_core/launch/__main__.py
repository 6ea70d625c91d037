"""`python -m varuna_core.launch`: hands over to `vjob`, which runs them.

The one file of `varuna_core` that imports `vjob`; tests/test_architecture.py names it.
"""

import sys

try:
    from vjob.shelf.launcher.cli import main
except ModuleNotFoundError as error:
    sys.exit(
        f"launch: the Python module {error.name} is missing: the launcher is part of vjob, install "
        f"that for {sys.executable} (pip install . in its checkout)"
    )

raise SystemExit(main())

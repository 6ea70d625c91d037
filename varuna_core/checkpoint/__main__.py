"""Run the command line of checkpoints: `python -m varuna_core.checkpoint`."""

import sys

from varuna_core.checkpoint.cli import main

sys.exit(main())

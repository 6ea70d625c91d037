"""`python -m varuna_core.launch`."""

from varuna_core.launch.cli import main

raise SystemExit(main())

"""`python -m varuna_core.agent`: the same commands as `python agent.pyz`."""

from varuna_core.agent.cli import main

raise SystemExit(main())

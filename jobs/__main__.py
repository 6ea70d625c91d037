"""`python -m jobs` is `vjob`."""

from jobs.cli import main

main()

"""The reader of scripts: bash itself, run in a jail, shows what a script would start.

`recording.read_script` is the entry point; it returns a `Recording`, which the importers use.
`passes` runs bash once (with `jail` and `prelude.bash`), `wrappers` separates a launcher's words
from its program's. Nothing that the script names is started. Imports `jobs.process` and
`jobs.errors`.
"""

"""The reader of scripts: bash itself, in a jail, shows what a script would start.

`recording.read_script` is the entry; its answer, `Recording`, is what the importers use. `passes`
starts bash once (`jail`, `prelude.bash`), `wrappers` tells a launcher's words from its program's.
Nothing that the script names is started. Imports `jobs.process` and `jobs.errors`.
"""

"""Monitor a distributed job: read its files and its scheduler, and give a verdict on its health.

`readers.job_reader.open_reader` reads snapshots (`model`), `rules.judge.judge` evaluates them, and
`model.text` renders the result. `log_lines` prints and classifies log lines, `stacks` collects the
Python stacks of all ranks.
"""

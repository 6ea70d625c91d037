"""Monitoring of a distributed job: what its files and its scheduler show, and a verdict on it.

`readers.job_reader.open_reader` reads snapshots (`model`), `rules.judge.judge` evaluates them;
`screen`, `watch` and `model.text` show the result. Beside those: log lines, stacks of all ranks.
"""

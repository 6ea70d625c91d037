"""Readers of a run's files and its scheduler: `job_reader.open_reader` returns one of a job.

Each read costs what is new; `settings` compares what was asked with what ranks print. Imports the
model, the log lines, the rules, the runs and the schedulers.
"""

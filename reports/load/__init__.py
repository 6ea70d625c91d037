"""Logs and traces of a job to tables: `tables.load_job`. Imports the records."""

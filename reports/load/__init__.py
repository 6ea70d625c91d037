"""Read a job's logs and traces into tables: `tables.load_job` reads, and `sources.locate_sources`
lists the files.

Memory is bounded regardless of the files' content. Imports only `varuna_core.records` from this
project.
"""

"""Read a job's logs and traces into tables: `tables.load_job` reads, and `sources.locate_sources`
lists the files.

The use of memory is bounded whatever the files contain. Imports only `varuna_core.records` from
this project.
"""

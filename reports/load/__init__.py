"""Logs and traces of a job to tables: `tables.load_job`; `sources.locate_sources` lists the files.

Memory is bounded whatever the files hold. Imports of ours only `varuna_core.records`.
"""

"""conf.yaml as types: schema, parsing with line numbers, writing, documentation. Imports
`vjob.jobs.errors` and the records alone.
"""

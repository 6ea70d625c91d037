"""Represent conf.yaml as types: `schema` has every key, `parse` reads a YAML tree into it with line
numbers, `write.render_resolved` writes it, `document` makes docs/conf.md and the starter conf.

Imports only `vjob.jobs.errors` and `varuna_core.records`; checks are in `conf.loading`.
"""

"""conf.yaml as types: `schema` has every key, `parse` reads a tree of them with line numbers,
`write.render_resolved` writes them, `document` makes docs/conf.md and the starter conf.

Imports `vjob.jobs.errors` and `varuna_core.records` alone; checks are in `conf.loading`.
"""

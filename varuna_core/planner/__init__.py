"""Find the fastest layout of a model on given GPUs, with its predicted step time and a proof.

`profile` holds measured figures, `model` times a step, `search` finds the best plan
(`search.search.Search`), `result` prepares it for people and programs. Imports numpy,
`varuna_core.schedule` and `varuna_core.records`, never torch. docs/planner_design.md has the
design.
"""

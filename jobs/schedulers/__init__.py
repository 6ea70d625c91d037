"""Schedulers: Slurm, or this machine in its place. Submit, poll and cancel jobs.

`choose.get_scheduler` returns the `base.Scheduler` of a run; `job` has the types that all of them
answer with; `slurm/` and `local/` are one scheduler each; `run_index` finds runs by id. Imports the
conf, the planner's GPU table, the records, and the machine lists of `varuna_core.launch`.
"""

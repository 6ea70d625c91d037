"""Schedulers: Slurm, or this machine in its place. Submit, poll and cancel jobs.

`choose.get_scheduler` returns the `base.Scheduler` of a run; `slurm_commands` builds Slurm's
command lines and parses their output; `run_index` finds runs by id. Imports the conf, the planner's
GPU table, the records and the launch room's machine lists.
"""

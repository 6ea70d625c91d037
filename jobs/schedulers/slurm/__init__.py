"""Slurm: sbatch, squeue, scontrol, sacct and sinfo. No module outside this room imports it.

`scheduler.SlurmScheduler` answers for it; `commands` and `nodes` build command lines and parse
their output, `reasons` explains why a job waits, `settings` reads what the cluster has configured.
"""

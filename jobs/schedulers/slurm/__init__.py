"""Slurm: sbatch, squeue, scontrol, sacct and sinfo. No module outside this room imports it.

`scheduler.SlurmScheduler` implements the scheduler; `commands` and `nodes` build command lines and
parse their output, `header` renders `#SBATCH` lines, `settings` checks the cluster's configuration.
"""

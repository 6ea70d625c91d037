"""Slurm: sbatch, squeue, scontrol, sacct and sinfo. Of other packages, only `allocation` imports
this one.

`scheduler.SlurmScheduler` implements the scheduler; `commands` and `nodes` build command lines and
parse their output, `header` renders `#SBATCH` lines, `settings` checks the cluster's configuration.
"""

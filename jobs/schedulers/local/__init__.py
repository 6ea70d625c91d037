"""Schedulers without Slurm: this machine, or a list of machines over ssh.

`scheduler.LocalScheduler` is the entry point; a detached `supervisor` runs the batch script with
stand-ins for `srun` and `scontrol` first on PATH.
"""

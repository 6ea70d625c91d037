"""This machine in the place of a scheduler: one machine, or a list of machines over ssh.

`scheduler.LocalScheduler` answers for it; a detached `supervisor` runs the batch script with the
stand-ins of `srun` first on PATH.
"""

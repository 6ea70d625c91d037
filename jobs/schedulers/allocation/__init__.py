"""The Slurm job that this shell is in, in the place of a scheduler: runs are steps of it.

The shell is one of salloc, of a batch script, of `srun --pty bash`, or a rank's.
`scheduler.AllocationScheduler` answers for it; a detached `supervisor` runs the batch script as a
step on the job's first node. `held_job` says what the job has. Imports the rooms of Slurm and of
this machine.
"""

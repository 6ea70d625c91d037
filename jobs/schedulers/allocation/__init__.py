"""The Slurm job that this shell is in, used as a scheduler: runs are steps of this job.

The shell may belong to salloc, a batch script, `srun --pty bash`, or a rank.
`scheduler.AllocationScheduler` implements the scheduler; a detached `supervisor` runs the batch
script as a step on the job's first node. `held_job` reads the job's resources. Imports the
schedulers of Slurm and of this machine.
"""

"""`python -m varuna_core.launch`: a training run on machines over ssh, or on this one.

What srun and the batch script are to a Slurm job, this package is to a list of machines. The node
agent that it starts on each of them is the one that jobs start. `cli.main` is the command,
`session.Session` plays one attempt, `watch` keeps agents on a list that changes, for a run that may
morph; `machines` and `ssh` are for `vjob` too.

Imports `varuna_core.agent`, `varuna_core.morph.orders`, `varuna_core.records`, and the planner
where a layout is to be chosen. No torch.
"""

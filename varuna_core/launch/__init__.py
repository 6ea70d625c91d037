"""Agents on a list of machines, over ssh or on this one: what srun is to a Slurm job.

The batch script of a local job calls these in the place of srun: `step.Step` plays one attempt on
machines that stay, `watch.MachineWatch` keeps agents on a list that changes, for a run that may
morph. `machines` and `ssh` are for `vjob` too.

Imports `varuna_core.agent`, `varuna_core.morph.orders`, `varuna_core.records`. No torch.
"""

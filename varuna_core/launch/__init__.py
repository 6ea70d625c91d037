"""Run agents on a list of machines, over ssh or locally, as srun does in a Slurm job.

The batch script of a local job calls this package instead of srun: `step.Step` runs one attempt on
a fixed list of machines, `watch.MachineWatch` keeps agents on a changing list, for a run that may
morph. `machines` and `ssh` are used by `vjob` too.

Imports `varuna_core.agent`, `varuna_core.morph.orders`, `varuna_core.records`. No torch.
"""

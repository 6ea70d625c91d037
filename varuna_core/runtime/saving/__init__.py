"""Save and load checkpoints of a Varuna model, also on signals.

`saving.Saving` saves and loads, `consensus.Consensus` raises one rank's error on all ranks,
`preemption.SignalCalls` records signals. Imports checkpoint, records, and the runtime's other
packages but `batch`.
"""

"""Save and load checkpoints of a Varuna, also on signals.

`saving.Saving` saves and loads, `consensus.Consensus` raises an error of one rank on all,
`preemption.SignalCalls` records signals. Imports checkpoint, records and the rooms before it.
"""

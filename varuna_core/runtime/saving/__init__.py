"""Checkpoints of a Varuna, and the signals that ask for one.

`saving.Saving` saves and loads, `consensus.Consensus` makes an error of one rank that of all,
`preemption.SignalCalls` notes signals. Imports checkpoint, records and the rooms before it.
"""

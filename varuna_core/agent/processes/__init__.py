"""Processes of a node: `process.run` and `process.start_rank` start them, `output.Pump` carries
what they print into files, `signals.Signals` notes the agent's own signals, `proc` reads /proc.

Imports `varuna_core.records` alone.
"""

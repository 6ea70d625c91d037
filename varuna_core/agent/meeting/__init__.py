"""Rendezvous of an attempt's nodes, and their watch over each other afterwards.

`opening.open_attempt` publishes the master's address, `meeting` waits for master, reports and go,
`watch.AttemptWatch` gives signs of life and obeys stops, over a connection of `link` or by files.
Imports the agent's `processes` and `setup`, and `varuna_core.records`.
"""

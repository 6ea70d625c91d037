"""Preflight: checks of a node before its ranks start. `preflight.inspect_node` runs them all.

Imports the agent's `processes`, `setup` and `meeting`, and `varuna_core.records`.
"""

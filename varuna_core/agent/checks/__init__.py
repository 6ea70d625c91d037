"""Preflight: whether this node can run its ranks. `preflight.run_checks`."""

"""Benchmarks of the runtime's parts: splitter, engine, shared layers, checkpoints, data."""

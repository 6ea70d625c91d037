"""Runs a schedule's actions on micro-batches: `engine.Engine`. Imports schedule, comm and split."""

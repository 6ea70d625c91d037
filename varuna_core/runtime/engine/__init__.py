"""Execution of a schedule's actions on micro-batches, on one rank.

`engine.Engine` runs the actions, `plans.Plans` builds and verifies the schedule, `microbatch` cuts
the batch and joins outputs. Imports schedule, comm and split.
"""

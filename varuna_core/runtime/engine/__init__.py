"""Execute a schedule's actions on micro-batches, on one rank.

`engine.Engine` runs the actions, with a pass of `passes` for each micro-batch on each stage;
`plans.Plans` builds and verifies the schedule, `microbatch` cuts the batch. Imports schedule, comm
and split.
"""

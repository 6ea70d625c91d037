"""Compute the step time and memory of a layout: `step.simulate_step`, `chain.Chain`.

cluster, training, compiled <- step <- tables <- chain. Imports schedule and `profile`.
"""

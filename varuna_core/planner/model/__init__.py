"""Time of a step and memory of each stage for a layout: `step.simulate_step`, `chain.Chain`.

cluster, training, compiled <- step <- tables <- chain. Imports schedule and `profile`.
"""

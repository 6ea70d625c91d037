"""A step's batch as the user sees it: inputs by name, outputs joined, means over tokens.

`named_inputs.InputNames`, `outputs.join_outputs` and `StepOutputs`, `token_means.LossWeights`. The
engine knows micro-batches alone (engine/microbatch.py). Imports engine, comm and split.
"""

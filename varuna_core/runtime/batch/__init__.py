"""Handle a step's batch as the user sees it: named inputs, joined outputs, means over tokens.

`named_inputs.InputNames`, `outputs.join_outputs` and `StepOutputs`, `token_means.LossWeights`. The
engine knows only micro-batches (engine/microbatch.py). Imports engine, comm and split.
"""

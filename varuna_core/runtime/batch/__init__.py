"""Convert a step's batch for the engine and back: named inputs, joined outputs, means over tokens.

`named_inputs.InputNames`, `outputs.join_outputs` and `StepOutputs`, `token_means.LossWeights`. The
engine itself handles only micro-batches (engine/microbatch.py). Imports engine, comm and split.
"""

"""Turn gradients into updated weights: sums over replicas, precision, ZeRO, clipping, optimizers.

`grads.Gradients` sums, `precision.Masters` holds what an optimizer updates, `updates.Updates` wraps
its step, `optimizers.build_optimizer` makes one by name. Imports comm, split and engine.
"""

"""Turn gradients into updated weights: sums over replicas, precision, ZeRO, clipping, optimizers.

`grads.Gradients` reduces them, `precision.Masters` holds an optimizer's parameters,
`updates.Updates` wraps its step, `optimizers.build_optimizer` builds one by name. Imports comm,
split and engine.
"""

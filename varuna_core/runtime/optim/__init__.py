"""From gradients to updated weights: sums over replicas, precision, ZeRO, clipping, optimizers."""

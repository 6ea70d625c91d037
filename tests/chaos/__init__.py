"""Chaos: a training is disturbed by faults of a seed, and comes out as if it were not."""

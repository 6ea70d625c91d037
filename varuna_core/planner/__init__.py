"""Which layout trains a model fastest on given GPUs, how long a step takes, and the proof.

Torch-free: numpy, `varuna_core.schedule` and the standard library. docs/planning.md has the design.
"""

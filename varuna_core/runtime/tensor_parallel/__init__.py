"""Layers shared by several ranks, by torch's styles.

`sharding.Sharding` shares the layers of a rank's stages by a plan; `shares.Shares` says which part
of a tensor a rank holds. Imports comm, split, and the boxes of checkpoints.
"""

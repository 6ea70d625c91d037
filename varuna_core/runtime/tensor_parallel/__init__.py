"""Share layers between several ranks, by torch's styles.

`sharding.Sharding` shares the layers of a rank's stages by a plan; `shares.Shares` returns the part
of a tensor that a rank holds. Imports comm, split, and the boxes of checkpoints.
"""

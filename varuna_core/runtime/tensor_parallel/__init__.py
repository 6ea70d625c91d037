"""Shard layers across several ranks, with torch's parallel styles.

`sharding.Sharding` shards the layers of a rank's stages by a plan; `shares.Shares` returns a rank's
shard of a tensor. Imports comm, split, and the boxes of checkpoints.
"""

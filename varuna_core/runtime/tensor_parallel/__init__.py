"""Layers shared by several ranks, by torch's styles.

Imports comm, split, and the boxes of checkpoints.
"""

"""Tests mirror the tree; tests/cluster is the Slurm lab and what runs on it."""

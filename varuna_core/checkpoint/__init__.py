"""Checkpoints that load at another shape and cannot be lost; docs/checkpoints.md has the design.

Torch-free, for `vjob` and for `inspect` and `verify`:

    errors <- box <- document <- tensorfile <- manifest <- store <- owner, verify <- cli

With torch: entries <- files, staging <- writer; reader <- exchange; optimizer_state, random_state.
Nothing here talks to another rank: what ranks share is the folder.
"""

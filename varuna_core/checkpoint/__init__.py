"""Checkpoints that load at another shape and cannot be lost; docs/checkpoints.md has the design.

`format` is the files, `store` a folder of checkpoints. Torch-free, for `vjob` and for `inspect` and
`verify`:

    errors <- box, document, tensorfile <- manifest <- store <- cli

With torch: entries <- plain, writer <- memory; reader <- exchange, torch_state.
Imports `varuna_core.records`. Nothing here talks to another rank: what ranks share is the folder.
"""

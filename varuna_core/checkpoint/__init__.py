"""Write and read checkpoints that any layout can load; docs/checkpoints.md has the design.

`format` has the file formats, `store` a folder of checkpoints. These modules need no torch, so that
`vjob`, `inspect` and `verify` can use them:

    errors <- box, document, tensorfile <- manifest <- store <- cli

With torch: entries <- plain, writer <- memory; reader <- exchange, torch_state.
Imports `varuna_core.records`. Ranks exchange no messages here: they only share the folder.
"""

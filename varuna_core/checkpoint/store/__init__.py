"""Manage a folder of checkpoints: write, read and verify them, claim the folder, remove old ones.

`writer.CheckpointWriter` saves a rank's part, `reader` loads into any layout, `store` claims,
verifies and removes. Imports `format` and `varuna_core.records`; `store` needs no torch.
"""

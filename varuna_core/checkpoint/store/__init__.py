"""A folder of checkpoints: written, read, verified, owned, cleared.

`writer.CheckpointWriter` saves a rank's part, `reader` loads any shape, `store` claims, verifies
and clears. Imports `format` and `varuna_core.records`; `store` needs no torch.
"""

"""Folders of checkpoints: written, read, verified, owned, cleared."""

"""Checkpoints of a Varuna, its copies in node memory, and signals that ask for either."""

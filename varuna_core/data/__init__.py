"""Token files, index maps and samples: numpy alone, no torch, so that a login node can run it."""

"""The loss of a node: our morph beside torch elastic with DCP, `python -m benchmarks.morph`."""

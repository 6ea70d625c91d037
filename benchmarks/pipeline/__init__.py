"""The runtime's speed, as ratios within one run: `python -m benchmarks.pipeline`."""

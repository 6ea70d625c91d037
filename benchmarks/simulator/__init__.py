"""The simulator held against the engine: `python -m benchmarks.simulator`."""

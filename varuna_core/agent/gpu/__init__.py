"""GPU readings: `gauges.open_gpus` finds a reader, `sampler.Sampler` writes samples to the logs.

Imports the agent's `processes` and `setup`, and `varuna_core.records`.
"""

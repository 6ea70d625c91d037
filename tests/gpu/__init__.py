"""Tests that need a GPU: the bodies of CPU tests with ranks on one, and what only a GPU shows.

`make gpu` runs them and writes down what was shown. `TESTS_DEVICE=cpu pytest tests/gpu` runs
the same bodies on processors where they can, so that nothing in them is first run on a GPU.
"""

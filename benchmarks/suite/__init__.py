"""Benchmarks of the test suite itself."""

"""Tests of `jobs.monitor`."""

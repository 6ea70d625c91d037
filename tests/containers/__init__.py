"""Tests of `containers`."""

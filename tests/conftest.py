"""Fixtures for all tests."""

from tests.cluster.fixtures import clean_lab, lab

__all__ = ["clean_lab", "lab"]

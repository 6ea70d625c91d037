"""Fixtures for all tests."""

from tests.cluster.fixtures import clean_lab, lab
from tests.containers.image import image

__all__ = ["clean_lab", "image", "lab"]

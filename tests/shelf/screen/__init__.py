"""Tests of the live screen, with the keys that a user presses."""

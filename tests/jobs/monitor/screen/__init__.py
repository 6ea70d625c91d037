"""Tests of the live screen, driven as by a user."""

"""The Python API and the submitit plugin."""

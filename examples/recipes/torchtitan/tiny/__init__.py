"""A package that trains: `python -m tiny.train`."""

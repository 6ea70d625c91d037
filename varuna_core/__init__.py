"""The training runtime, and the torch-free records and node agent that every part of vjob shares.

Importing this package imports nothing else: a bare container and the node agent rely on it.
"""

__version__ = "0.1.0"

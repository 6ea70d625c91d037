"""The fastest layout of a space and the proof that it is: `search.search`. Imports `model`."""

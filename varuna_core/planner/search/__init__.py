"""The fastest layout of a space and the proof that it is: `search.Search`.

space <- bounds <- partition <- search. Imports `model`, `profile` and the schedules.
"""

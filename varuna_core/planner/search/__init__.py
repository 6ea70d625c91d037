"""Find the fastest layout in a space and prove that it is: `search.Search`.

space <- bounds <- partition <- search. Imports `model`, `profile` and the schedules.
"""

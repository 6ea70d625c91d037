"""Staged ends of jobs, with the cause, the actor and the remedies that vjob is to name for each.

`table` has the rows, `errors` the programs that fail, `staging` makes the folder that such an end
leaves, and `__main__` asks vjob about it.
"""

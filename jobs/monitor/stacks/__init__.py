"""Python stacks of all ranks.

`collect.collect_stacks` asks the nodes, `group.render_stacks` prints equal ones as groups. Imports
the runs, the schedulers and what the agent knows of stacks.
"""

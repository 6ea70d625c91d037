"""Python stacks of all ranks, and a shell beside them.

`collect.collect_stacks` asks the nodes, `group.render_stacks` prints equal ones as groups;
`shell.open_shell` starts a shell on a node. Imports the runs, the schedulers and what the agent
knows of stacks.
"""

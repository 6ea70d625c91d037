"""Node agent: the program that runs on a node between srun and the ranks. It needs only the
standard library of Python 3.8.

The agent is one file, `agent.pyz` (`bundle.write_bundle`), which runs outside the container with
whatever python3 the node has. `cli.main` has its commands, `node.run_node` one node's part of an
attempt, `supervise` its ranks, `closing.judge` how the attempt ended. Besides its own packages, the
agent imports facts, hang, plugins and records.
"""

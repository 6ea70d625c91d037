"""Node agent: what runs on a node between srun and the ranks. Standard library, Python 3.8.

It runs outside the container with whatever python3 the node has, carried there as `agent.pyz`
(`bundle.write_bundle`). `cli.main` has its commands, `node.run_node` one node's part of an attempt,
`supervise` its ranks, `closing.judge` how the attempt ended. Outside its own rooms it imports the
records alone.
"""

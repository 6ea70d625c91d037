"""The node agent: what a node does between srun and the ranks. Standard library, Python 3.8.

It runs outside the container with whatever python3 the node has, carried there as `agent.pyz`
(`bundle.py`); so it imports nothing but `varuna_core.records` and itself. Commands: `cli.py`.
"""

"""Training on nodes that come and go; docs/morphing.md has the design. Python 3.8, no torch.

    records <- agent <- morph:  words <- machine;  layout;  orders <- stay, manager <- cli

Runs in `agent.pyz` beside the agent: one manager beside the batch script, one `stay` on each node.
"""

"""Start of a node's ranks: `host` finds plan and node, `container` the runtime, `ranks.build_rank`
makes a rank's environment and command line; `site` is what all of these know of the node.

Imports the agent's `processes`, and `varuna_core.records`.
"""

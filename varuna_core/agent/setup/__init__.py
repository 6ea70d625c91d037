"""Start of a node's ranks: what they run in, their environment and their command line.

`site.load_plan` and `site.find_index` find the node in the plan, `container.choose_container` the
runtime, `ranks.build_rank` the command. Imports the agent's `processes`, and the records.
"""

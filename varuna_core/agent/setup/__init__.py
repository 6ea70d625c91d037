"""Start of a node's ranks: what they run in, their environment and their command line.

`site.load_plan` and `site.find_index` find the node in the plan, `container.choose_container` the
runtime, `holder.hold_container` starts the container that ranks enter, `ranks.build_rank` makes the
command. Imports the agent's `processes`, and the records.
"""

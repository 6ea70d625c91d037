"""Start of a node's ranks: what they run in, their environment and their command line.

`site.load_plan` and `site.compute_index` find the node in the plan,
`container.choose_container` the runtime, `holder.hold_container` starts the container that ranks
enter, `ranks.build_rank` makes the command and `world.build_world` the variables that say where a
rank is, `known_lines` the remedy of a runtime's message. Imports the agent's `processes`, the
records and the facts.
"""

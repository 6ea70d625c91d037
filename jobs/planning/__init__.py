"""What the planner is asked on behalf of a conf, and what its answer becomes."""

"""The Python stacks of all ranks: `collect` asks the nodes, `group` puts equal ones together."""

"""What a node and its ranks are given: plan, environment, command line, container."""

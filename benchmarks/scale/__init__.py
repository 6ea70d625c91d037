"""Growth of vjob's parts with the number of nodes, and a simulated cluster around a real hub."""

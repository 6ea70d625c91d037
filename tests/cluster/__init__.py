"""The test lab: a real Slurm cluster on one machine, each node a network namespace."""

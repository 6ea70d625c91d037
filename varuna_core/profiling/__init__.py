"""`Profiler`: what a model costs on the GPUs and links that are here, written for the planner."""

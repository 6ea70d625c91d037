"""`Profiler`: what a model costs on the GPUs and links that are here, written for the planner.

`profiler.Profiler` is its only door. Imports the runtime, and the planner's profile files.
"""

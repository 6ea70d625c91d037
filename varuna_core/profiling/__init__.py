"""Measure the times and memory of a model on the available GPUs and links, for the planner.

`profiler.Profiler` is the only public class; probe.py is a program by itself, for `vjob doctor`.
Imports the runtime, and the planner's profile files.
"""

"""A stranger's path over the README: each command as typed, what one sees, how long it takes.

walk   types commands, waits, looks at the screen; whatever is not seen is a dead end
confs  what the stranger writes
paths  the ways: uniform nodes, mixed nodes, and where people stumble
python -m tests.stranger   walks all of them and writes benchmarks/results/stranger.md
"""

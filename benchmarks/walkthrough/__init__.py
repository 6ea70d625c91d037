"""A new user's walkthrough of the README: each command as typed, its output and its time.

session.py types commands, waits and watches the live screen; output that is missing ends it all.
parts.py has the parts: uniform nodes, mixed nodes, mistakes, a full queue, a full disk.
`python -m benchmarks.walkthrough` runs all of them and writes benchmarks/results/walkthrough.md.
"""

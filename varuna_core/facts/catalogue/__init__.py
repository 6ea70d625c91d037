"""Known lines: what a line of a log, of the scheduler or of a container runtime means.

    known_line.py   KnownLine: a pattern, where it counts, and how far it proves a cause
    one file of rows for each scope

A new row is all that a new message needs.
"""

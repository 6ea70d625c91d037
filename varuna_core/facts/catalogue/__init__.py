"""Known lines: what a line of a log, of the scheduler or of a container runtime means.

    known_line.py    KnownLine: a pattern, where it counts, and how far it proves a cause
    rank_output.py   node.py   containers.py   slurm.py   ssh.py       the rows, by who writes them
    remedies.py      remedies that many rows share
    ends.py          the remedies of each cause; page.py writes docs/causes.md of them
    tables.py        all rows by scope, with those of plug-ins; the search for one; known_lines.json
    patterns.py      the check that no pattern takes long on any line

A new row is all that a new message needs: a pattern, a meaning, remedies. Imports the facts alone.
"""

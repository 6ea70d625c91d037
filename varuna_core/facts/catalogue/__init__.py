"""Known lines: what a line of a log, of the scheduler or of a container runtime means.

    known_line.py    KnownLine: a pattern, where it counts, and how far it proves a cause
    rank_output.py   node.py   containers.py   slurm.py   ssh.py       the rows, by who writes them
    remedies.py      remedies that many rows share
    ends.py          the remedies of each cause, which docs/causes.md lists
    tables.py        all rows by scope, with those of plug-ins; lookup of a row; known_lines.json
    patterns.py      the check that no pattern takes long on any line

To support a new message, add one row: a pattern, a meaning and remedies. This package imports only
`varuna_core.facts`.
"""
